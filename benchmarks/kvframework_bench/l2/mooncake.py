"""The part `mooncake`: put and get of the tier plugin next to plain TCP, alternately. The client, the master and the
peer are three processes, the plain peer a fourth."""

from __future__ import annotations

import time
from pathlib import Path

from kvframework.api.plugin import ByteSize
from kvframework.api.tier import Outcome, Tier
from kvframework.registry.registry import PluginRegistry
from kvframework.storage.namespaces import HEADER_BYTES
from kvframework_bench.console import Stage
from kvframework_bench.l2.figures import MooncakeRow
from kvframework_bench.l2.mooncake_store import running_mooncake
from kvframework_bench.l2.sizes import Sizes
from kvframework_bench.l2.tier import Values, check_plugin, expect, keys_for, open_tier
from kvframework_bench.rounds import interleave, rate_gb_s, ratio, timed
from kvframework_bench.tcp_reference import TcpPeer, running_tcp_peer

TARGET_RATIO = 0.6
_DEADLINE_S = 60.0
# Times of the bytes of a call that the store holds: it evicts before it is full.
_ROOM = 8


def bench_mooncake(sizes: Sizes, directory: Path, registry: PluginRegistry, stage: Stage) -> list[MooncakeRow]:
    """Measure the tier. Raises `BenchUnavailable` without Mooncake, `BenchFailed`, and `WrongBytes`."""
    check_plugin(registry, "tier", "mooncake")
    with (
        running_tcp_peer(directory) as bare,
        running_mooncake(directory, _ROOM * sizes.call_bytes) as master,
        open_tier(registry, "mooncake", {"master": master}) as tier,
    ):
        return [row for nbytes in sizes.value_bytes for row in _rows(sizes, nbytes, bare, tier, stage)]


def _rows(sizes: Sizes, nbytes: int, bare: TcpPeer, tier: Tier, stage: Stage) -> list[MooncakeRow]:
    values = Values(nbytes, max(sizes.call_bytes // nbytes, 1))
    calls = _TierCalls(tier, values)
    bare.make_room(values.total)
    cases = {
        "put": calls.put,
        "get": calls.get,
        "bare put": lambda: bare.put(values.sources),
        "bare get": lambda: bare.get(values.targets),
    }
    with stage(f"values of {ByteSize(nbytes)} in Mooncake", sizes.mooncake_rounds) as advance:
        calls.put()
        calls.verify()
        bare.put(values.sources)
        values.poison()
        bare.get(values.targets)
        values.verify("plain TCP")
        measured = interleave(cases, rounds=sizes.mooncake_rounds, advance=advance)
        calls.verify()
    expect(tier.delete(calls.keys, deadline=time.monotonic() + _DEADLINE_S), Outcome.DELETED)
    return [
        MooncakeRow(
            operation=operation,
            value_bytes=nbytes,
            nbytes=values.total,
            reference_gb_s=rate_gb_s(values.total, measured[f"bare {operation}"]),
            tier_gb_s=rate_gb_s(values.total, measured[operation]),
            ratio_to_reference=ratio(measured[f"bare {operation}"], measured[operation]),
            target_ratio=TARGET_RATIO,
        )
        for operation in ("put", "get")
    ]


class _TierCalls:
    """One call for all values, as a batch of the server: each behind a separate header."""

    def __init__(self, tier: Tier, values: Values) -> None:
        self.keys = keys_for(len(values.sources), b"m")
        self._tier = tier
        self._values = values
        header = memoryview(bytearray(HEADER_BYTES))
        self._sources = [[header, source] for source in values.sources]
        self._targets = [[memoryview(bytearray(HEADER_BYTES)), target] for target in values.targets]

    def put(self) -> float:
        deadline = time.monotonic() + _DEADLINE_S
        return timed(lambda: expect(self._tier.put(self.keys, self._sources, deadline=deadline), Outcome.STORED))

    def get(self) -> float:
        deadline = time.monotonic() + _DEADLINE_S
        return timed(lambda: expect(self._tier.get_into(self.keys, self._targets, deadline=deadline), Outcome.FOUND))

    def verify(self) -> None:
        self._values.poison()
        self.get()
        self._values.verify("the mooncake tier")
