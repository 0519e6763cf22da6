"""The checks of `kvframework doctor` for a Mooncake Store: whether its client can be imported, and its master listens.
Runs in a process of its own; changes nothing."""

from __future__ import annotations

from kvf_mooncake.client import library, reach_master
from kvf_mooncake.options import MooncakeOptions
from kvframework.api.plugin import Finding, TableContext
from kvframework.errors import TierError


def diagnose(options: MooncakeOptions, context: TableContext, deadline: float) -> list[Finding]:
    """Asks nothing of the master: a client that joins would be one of the store's."""
    try:
        library(context.where)
    except TierError as error:
        return [Finding("mooncake.client", "fail", error.fact, error.hint)]
    try:
        own_address = reach_master(options, context.where, deadline)
    except TierError as error:
        advice = f"{error.hint}: until then the server works without this tier"
        return [Finding("mooncake.master", "fail", error.fact, advice)]
    fact = f"{options.master} listens, this node is {options.host or own_address} for the peers"
    if not options.host and own_address.startswith("127."):
        advice = "give host, if peers are on other machines"
        return [Finding("mooncake.master", "ok", fact), Finding("mooncake.host", "warn", "a loopback address", advice)]
    return [Finding("mooncake.master", "ok", fact)]
