"""The `pinned` memory (L1): one shared memfd segment, made resident in the background. Runs in the server process."""

from __future__ import annotations

from kvf_pinned.memory import MemfdArena
from kvf_pinned.nodes import choose
from kvf_pinned.options import PinnedOptions
from kvframework.api import Finding, L1Memory, L1Provider, TierContext, hookimpl


def _create(options: PinnedOptions, context: TierContext) -> L1Memory:
    return MemfdArena(options.capacity, where=context.where, choice=choose(options.numa))


def _diagnose(options: PinnedOptions, _context: TierContext, _deadline: float) -> list[Finding]:
    from kvf_pinned.advice import diagnose

    return diagnose(options)


@hookimpl
def kvf_tiers() -> list[L1Provider[PinnedOptions]]:
    """The provider of the arena."""
    return [
        L1Provider(
            name="pinned",
            summary="one shared memory segment without a name, made resident in the background",
            options=PinnedOptions,
            capabilities=frozenset({"capacity"}),
            create=_create,
            diagnose=_diagnose,
        )
    ]
