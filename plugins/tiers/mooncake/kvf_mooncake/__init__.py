"""The `mooncake` L2 tier: Mooncake Store, memory of many nodes as one. Its client can freeze a process, so it runs in a
helper process that is killed then.

Importing this module imports nothing of Mooncake.
"""

from __future__ import annotations

from importlib.util import find_spec

from kvf_mooncake.options import MooncakeOptions
from kvframework.api.findings import Finding
from kvframework.api.tier import TableContext, Tier, TierProvider, hookimpl


def _probe() -> str | None:
    if find_spec("mooncake") is None:
        from kvf_mooncake.client import missing

        return f"Mooncake is not installed: {missing()}"
    return None


def _create(options: MooncakeOptions, context: TableContext) -> Tier:
    from kvf_mooncake.server_side import MooncakeHelperTier

    return MooncakeHelperTier(options, where=context.where)


def _diagnose(options: MooncakeOptions, context: TableContext, deadline: float) -> list[Finding]:
    from kvf_mooncake.advice import diagnose

    return diagnose(options, context, deadline)


@hookimpl
def kvf_tiers() -> list[TierProvider[MooncakeOptions]]:
    """The provider of the Mooncake tier."""
    return [
        TierProvider(
            name="mooncake",
            summary="Mooncake Store: the memory of many nodes, over TCP or RDMA",
            options=MooncakeOptions,
            shared=True,
            store=lambda options: f"mooncake {options.master} {options.prefix}",
            probe=_probe,
            create=_create,
            diagnose=_diagnose,
        )
    ]
