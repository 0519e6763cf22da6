"""The `peers` L2 tier: what the L1 of other nodes holds. Runs in the server process: loads in its storage threads, and
loans to other nodes in threads of its own."""

from __future__ import annotations

from kvf_peers.options import PeersOptions
from kvframework.api.plugin import Finding
from kvframework.api.tier import TableContext, Tier, TierProvider, hookimpl


def _create(options: PeersOptions, context: TableContext) -> Tier:
    from kvf_peers.tier import open_tier

    return open_tier(options, where=context.where)


def _check(options: PeersOptions, context: TableContext) -> None:
    from kvf_peers.settings import read_settings

    read_settings(options, where=context.where)


def _store(_options: PeersOptions) -> str:
    return "the L1 of other nodes"


def _diagnose(options: PeersOptions, context: TableContext, deadline: float) -> list[Finding]:
    from kvf_peers.advice import diagnose

    return diagnose(options, context, deadline)


@hookimpl
def kvf_tiers() -> list[TierProvider[PeersOptions]]:
    """The provider of the peers tier."""
    return [
        TierProvider(
            name="peers",
            summary="the L1 of other nodes, over TCP or TLS; read only",
            options=PeersOptions,
            shared=True,
            create=_create,
            check=_check,
            store=_store,
            diagnose=_diagnose,
            loads=4,
        )
    ]
