"""The `pinned` memory of L1: one shared memfd segment, made resident in the background. Runs in the server process."""

from __future__ import annotations

import logging
from functools import partial

from kvf_pinned.memory import MemfdArena, check_pages, check_room
from kvf_pinned.nodes import PinnedOptions, choose, choose_pages, pages_of_kept, read_pool, wait_for_pool
from kvframework.api.memory import ArenaError, Memory, MemoryContext, MemoryProvider, TableContext, hookimpl
from kvframework.api.plugin import Finding

_log = logging.getLogger(__name__)

# An engine unmaps the arena of a server that has ended once its last copy is done.
_PATIENCE_S = 2.0


def _create(options: PinnedOptions, context: MemoryContext) -> Memory:
    make = partial(
        MemfdArena,
        options.capacity,
        where=context.where,
        choice=choose(options.numa),
        kept=context.kept,
        outlives=context.outlives,
    )
    if context.kept is not None:
        return make(pages=pages_of_kept(context.kept, options.huge_pages, options.capacity))
    pages = check_pages(options.huge_pages, options.capacity, where=context.where)
    if pages.kind != "reserved":
        return make(pages=pages)
    try:
        if not wait_for_pool(options.capacity, _PATIENCE_S):
            pool = read_pool()
            raise ArenaError(str(pool), where=context.where, hint=pool.more(options.capacity))
        return make(pages=pages)
    except ArenaError as error:
        pages = choose_pages("transparent", options.capacity)
        if options.huge_pages == "on" and pages.kind == "small":
            raise
        _log.warning(
            "%s: the arena gets no reserved pages, because other processes hold them: %s", context.where, error.fact
        )
        return make(pages=pages)


def _check(options: PinnedOptions, context: TableContext) -> None:
    check_room(options.capacity, check_pages(options.huge_pages, options.capacity, where=context.where), context.where)


def _diagnose(options: PinnedOptions, _context: TableContext, _deadline: float) -> list[Finding]:
    from kvf_pinned.advice import diagnose

    return diagnose(options)


@hookimpl
def kvf_memories() -> list[MemoryProvider[PinnedOptions]]:
    """The provider of the arena."""
    return [
        MemoryProvider(
            name="pinned",
            summary="one anonymous shared memory segment, made resident in the background",
            options=PinnedOptions,
            create=_create,
            keeps=True,
            check=_check,
            diagnose=_diagnose,
        )
    ]
