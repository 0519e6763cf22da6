"""The `pinned` memory of L1: one shared memfd segment, made resident in the background. Runs in the server process."""

from __future__ import annotations

from kvf_pinned.memory import MemfdArena, check_pages, check_room
from kvf_pinned.nodes import choose
from kvf_pinned.options import PinnedOptions
from kvframework.api.findings import Finding
from kvframework.api.memory import Memory, MemoryContext, MemoryProvider, TableContext, hookimpl


def _create(options: PinnedOptions, context: MemoryContext) -> Memory:
    return MemfdArena(
        options.capacity,
        where=context.where,
        choice=choose(options.numa),
        pages=check_pages(options.huge_pages, where=context.where),
        kept=context.kept,
        outlives=context.outlives,
    )


def _check(options: PinnedOptions, context: TableContext) -> None:
    check_room(options.capacity, where=context.where)
    check_pages(options.huge_pages, where=context.where)


def _diagnose(options: PinnedOptions, _context: TableContext, _deadline: float) -> list[Finding]:
    from kvf_pinned.advice import diagnose

    return diagnose(options)


@hookimpl
def kvf_memories() -> list[MemoryProvider[PinnedOptions]]:
    """The provider of the arena."""
    return [
        MemoryProvider(
            name="pinned",
            summary="one shared memory segment without a name, made resident in the background",
            options=PinnedOptions,
            create=_create,
            keeps=True,
            check=_check,
            diagnose=_diagnose,
        )
    ]
