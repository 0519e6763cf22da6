"""Owns what a server says of its L2 tier while it is measured: what still waits to be written, and what went wrong."""

from __future__ import annotations

import time
from typing import Any

from kvframework.bench.errors import BenchFailed
from kvframework.bench.server import RunningServer, status
from kvframework.client import KVClient

_POLL_S = 0.002
# A bench's batch on a busy machine must not look like a dead tier.
TIMEOUT_S = 30.0
_LOSSES = ("store_failed", "write_dropped", "write_lost", "write_given_up", "errors", "corrupt")


def redis_settings(url: str, **more: object) -> list[str]:
    """`serve --set` of one Redis behind L1."""
    values = {"use": "redis", "url": url} | more
    return [f"l2.0.{key}={value}" for key, value in values.items()]


def tier_status(client: KVClient) -> dict[str, Any]:
    """Of the one tier."""
    found: dict[str, Any] = status(client)["l2"][0]
    return found


def await_written(server: RunningServer, client: KVClient, timeout_s: float = 120.0) -> None:
    """Waits until all that was stored is in L2. Raises `BenchFailed` if something never came there."""
    deadline = time.monotonic() + timeout_s
    while (tier := tier_status(client))["write_pending"]:
        server.child.check_alive()
        if time.monotonic() > deadline:
            raise server.child.failure(f"had not written everything to L2 within {timeout_s:.0f} s")
        time.sleep(_POLL_S)
    lost = {name: tier[name] for name in _LOSSES if tier.get(name)}
    if lost:
        raise BenchFailed(f"objects did not come to L2: {lost}", available=str(tier["last_error"]))
