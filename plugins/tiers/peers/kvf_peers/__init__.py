"""The `peers` L2 tier: what the L1 of other nodes holds. Runs in the server process: loads in its storage threads, and
loans to other nodes in separate threads."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvframework.api.plugin import ByteSize, Finding, Options
from kvframework.api.tier import TableContext, Tier, TierProvider, hookimpl

# Each is asked about each prompt that L1 lacks; larger fleets share a store.
MOST_ASKED = 8


class PeersOptions(Options, frozen=True):
    """Options of the `peers` tier; each field has a description."""

    token_file: Annotated[
        str,
        Meta(
            min_length=1,
            description="file with the secret that all nodes share, 16 bytes or more; read for each new connection. No "
            "other user may read the file",
        ),
    ]
    listen: Annotated[str, Meta(description="HOST:PORT at which other nodes load from this node; empty: none")] = ""
    peers: Annotated[
        list[str],
        Meta(
            max_length=MOST_ASKED,
            description='up to 8 nodes to load from: ["HOST:PORT", ...], the values of their listen; this node may be '
            "in the list, so that all nodes have the same list",
        ),
    ] = []  # noqa: RUF012  msgspec gives each its own
    trusted_network: Annotated[
        bool,
        Meta(
            description="send values without encryption to other machines; without this option, other machines need TLS"
        ),
    ] = False
    tls_ca: Annotated[
        str, Meta(description="PEM file of the certificates that sign the nodes' certificates; turns TLS on")
    ] = ""
    tls_cert: Annotated[str, Meta(description="PEM file of this node's certificate, for both directions")] = ""
    tls_key: Annotated[str, Meta(description="PEM file of this node's private key")] = ""
    ask_s: Annotated[
        float, Meta(gt=0, le=10, description="longest wait, in seconds, for nodes to answer whether they hold a prompt")
    ] = 0.25
    connections: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="most connections from other nodes; a further one closes the connection idle for longest",
        ),
    ] = 64
    lent_bytes: Annotated[
        ByteSize,
        Meta(
            description="most bytes being sent to other nodes at once, and at most a quarter of L1; further requests "
            "wait for a moment and are then refused"
        ),
    ] = ByteSize(256 << 20)


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
            summary="loads from the L1 of other nodes, over TCP or TLS; read only",
            options=PeersOptions,
            shared=True,
            create=_create,
            check=_check,
            store=_store,
            diagnose=_diagnose,
            loads=4,
        )
    ]
