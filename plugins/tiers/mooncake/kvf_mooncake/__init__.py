"""The `mooncake` L2 tier: Mooncake Store, memory of many nodes as one. Its client can freeze a process, so it runs in a
helper process that is killed then.

Importing this module imports nothing of Mooncake.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Annotated, Literal

from msgspec import Meta

from kvframework.api.plugin import Finding, Options
from kvframework.api.tier import TableContext, Tier, TierProvider, hookimpl

_PLACE = re.compile(r"(?P<host>[^\s:/\[\]]+|\[[0-9a-fA-F:.]+\]):(?P<port>[0-9]{1,5})")


class MooncakeOptions(Options, frozen=True):
    """Options of the `mooncake` tier."""

    master: Annotated[str, Meta(description="address of mooncake_master, host:port")]
    host: Annotated[
        str, Meta(description="address or name of this node for its peers; empty: the address that reaches master")
    ] = ""
    metadata_server: Annotated[
        str,
        Meta(min_length=1, description="metadata server, equal on all nodes; P2PHANDSHAKE: none, nodes ask each other"),
    ] = "P2PHANDSHAKE"
    protocol: Annotated[Literal["tcp", "rdma"], Meta(description="protocol that moves values between nodes")] = "tcp"
    devices: Annotated[
        str, Meta(description="RDMA devices, separated by commas; empty: Mooncake chooses; for protocol rdma")
    ] = ""
    replicas: Annotated[int, Meta(ge=1, le=16, description="number of copies of each value, each on another peer")] = 1
    prefix: Annotated[
        str, Meta(max_length=64, description="text before each key; the key is 72 bytes in hexadecimal")
    ] = "kvf:"

    def __post_init__(self) -> None:
        place(self.master)
        if self.devices and self.protocol != "rdma":
            raise ValueError(f'devices needs protocol = "rdma", found {self.protocol!r}')


def place(master: str) -> tuple[str, int]:
    """Host and port. Raises `ValueError`."""
    found = _PLACE.fullmatch(master)
    if found is None or not 0 < int(found["port"]) < 1 << 16:
        raise ValueError(f'master is "host:port", such as "10.0.0.7:50051", found {master!r}')
    return found["host"].strip("[]"), int(found["port"])


def _probe() -> str | None:
    if find_spec("mooncake") is None:
        from kvf_mooncake.client import missing

        return f"Mooncake is not installed: {missing()}"
    return None


def _create(options: MooncakeOptions, context: TableContext) -> Tier:
    from kvf_mooncake.client import MooncakeHelperTier

    return MooncakeHelperTier(options, where=context.where)


def _diagnose(options: MooncakeOptions, context: TableContext, deadline: float) -> list[Finding]:
    from kvf_mooncake.client import diagnose

    return diagnose(options, context, deadline)


@hookimpl
def kvf_tiers() -> list[TierProvider[MooncakeOptions]]:
    """The provider of the Mooncake tier."""
    return [
        TierProvider(
            name="mooncake",
            summary="stores values in Mooncake Store, the memory of many nodes, over TCP or RDMA",
            options=MooncakeOptions,
            shared=True,
            store=lambda options: f"mooncake {options.master} {options.prefix}",
            probe=_probe,
            create=_create,
            diagnose=_diagnose,
        )
    ]
