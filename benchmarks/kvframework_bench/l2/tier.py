"""The tier under measurement: the plugin itself, made as a server makes it, or a server's; and the values put
there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvframework.api.tier import Outcome, PackedKey, TableContext, Tier, TierProvider
from kvframework.client import KVClient
from kvframework.config.schema import PluginTable
from kvframework.errors import PluginError
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import resolve_table
from kvframework_bench.errors import BenchFailed, BenchUnavailable, WrongBytes
from kvframework_bench.server import RunningServer, status

WHERE = "bench l2"


@contextmanager
def open_tier(registry: PluginRegistry, name: str, options: Mapping[str, object]) -> Iterator[Tier]:
    """Yield the tier, which is closed with the context. Raises `BenchUnavailable`."""
    check_plugin(registry, "tier", name)
    provider, made = resolve_table(registry, PluginTable(name, dict(options), WHERE), TierProvider)
    tier = provider.create(made, TableContext(WHERE))
    try:
        yield tier
    finally:
        tier.close()


def check_plugin(registry: PluginRegistry, kind: str, name: str) -> None:
    """Raise `BenchUnavailable` unless the plugin can run here."""
    try:
        registry.resolve(kind, name, where=WHERE)
    except PluginError as error:
        raise BenchUnavailable(error.fact, hint=error.hint) from None


def keys_for(count: int, letter: bytes) -> list[PackedKey]:
    """Return keys as long as an object's. They differ in their last byte, as digests do."""
    return [letter * 71 + bytes([index]) for index in range(count)]


def expect(answers: Sequence[int | Outcome], wanted: Outcome) -> None:
    """Raise `BenchFailed` if an answer is not `wanted`: a failure has no speed. Received bytes count as FOUND."""
    outcomes = [answer if isinstance(answer, Outcome) else Outcome.FOUND for answer in answers]
    others = [outcome.value for outcome in outcomes if outcome is not wanted]
    if others:
        raise BenchFailed(
            f"{len(others)} of {len(outcomes)} values are {' or '.join(sorted(set(others)))}", available=wanted.value
        )


_POLL_S = 0.002
# A bench's batch on a busy machine must not look like a dead tier.
TIMEOUT_S = 30.0
_LOSSES = ("store_failed", "write_dropped", "write_lost", "write_given_up", "errors", "corrupt")


def redis_settings(url: str, **more: object) -> list[str]:
    """Return the options of `serve --set` for one Redis behind L1."""
    values = {"use": "redis", "url": url} | more
    return [f"l2.0.{key}={value}" for key, value in values.items()]


def tier_status(client: KVClient) -> dict[str, Any]:
    """Return the status of the one tier."""
    found: dict[str, Any] = status(client)["l2"][0]
    return found


def await_written(server: RunningServer, client: KVClient, timeout_s: float = 120.0) -> None:
    """Wait until all stored objects are in L2. Raises `BenchFailed` if one does not arrive there."""
    deadline = time.monotonic() + timeout_s
    while (tier := tier_status(client))["write_pending"]:
        server.child.check_alive()
        if time.monotonic() > deadline:
            raise server.child.failure(f"had not written everything to L2 within {timeout_s:.0f} s")
        time.sleep(_POLL_S)
    lost = {name: tier[name] for name in _LOSSES if tier.get(name)}
    if lost:
        raise BenchFailed(f"objects were not written to the tier: {lost}; its last error: {tier['last_error']}")


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


class Values:
    """`count` random values of `nbytes` each, and touched memory to receive them. It is freed with its last view."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes = nbytes
        self.total = nbytes * count
        source, target = mmap.mmap(-1, self.total), mmap.mmap(-1, self.total)
        for start in range(0, self.total, nbytes):
            source[start : start + nbytes] = os.urandom(nbytes)
        self._source_at, self._target_at = _address(source), _address(target)
        self.sources = _pieces(source, nbytes)
        self.targets = _pieces(target, nbytes)
        self.poison()

    def poison(self) -> None:
        """Fill the targets with one repeated byte, so that missing values are seen."""
        ctypes.memset(self._target_at, 0xA5, self.total)

    def verify(self, way: str) -> None:
        """Raise `WrongBytes` unless the targets equal the sources byte for byte. `way` names the path of the values."""
        if _memcmp(self._source_at, self._target_at, self.total):
            raise WrongBytes(f"the value read by {way} differs from the stored value", hint="no figures are reported")


def _pieces(buffer: mmap.mmap, nbytes: int) -> list[memoryview]:
    view = memoryview(buffer)
    return [view[start : start + nbytes] for start in range(0, view.nbytes, nbytes)]


def _address(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
