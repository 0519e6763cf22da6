"""A real server process that serves a trace, and the simulator that is given the same one at the same times.

Nothing but time differs. A server writes to its tiers and evicts in threads of their own, so both come to rest before
the next request; what a tier lacked is remembered for half a second, so a chunk that L1 may lack is not asked for again
within it.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from kvf_plan.simulation import Settings, TierSpeed, simulate
from kvf_plan.simulation.chunks import Chunks
from kvf_plan.simulation.node import MODEL
from kvframework.api.keys import CacheKey
from kvframework.config.load import load_config
from kvframework.registry.registry import PluginRegistry
from kvframework.storage.l2.tier_calls import HOLD_S
from kvframework.wire import messages as m
from tests.plan.planning.traces import MadeTrace
from tests.plan.simulate.made import SOON
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient

CHUNK = 16
BYTES_PER_TOKEN = 256
CAPACITY = "1MiB"
# Of the clock, and of how a server has started.
OF_TIME = {
    "l1": {"evicted_idle_s", "wanted_after_eviction_s", "recovered", "journal_bytes", "ready_bytes"},
    "l2": {
        *("name", "usage", "details", "capabilities", "state_s", "seconds", "latency_ms", "oldest_call_s"),
        *("load_bytes_per_s", "load_call_s"),
    },
}


class RealEngine:
    """What an engine sends: LOOKUP, RETRIEVE of the hit and STORE of the whole prompt, in order."""

    def __init__(self, client: WireClient, high: float) -> None:
        self._client = client
        self._high = high
        self._chunks = Chunks(CHUNK, CHUNK, whole=True)
        self._namespace = client.register(
            model_name=MODEL,
            block_size=1,
            num_layers=1,
            hidden_dim_size=BYTES_PER_TOKEN,
            dtype_str="uint8",
            use_mla=True,
        ).namespace
        self._asked: dict[bytes, tuple[int, float]] = {}

    def serve(self, trace: MadeTrace) -> list[float]:
        times = []
        began = time.monotonic()
        for index, request in enumerate(trace):
            digests = self._chunks.digests(request)
            self._let_absences_pass(index, digests)
            times.append(time.monotonic() - began)
            self._one(f"r{index + 1}", digests)
            self._asked.update(dict.fromkeys(digests, (index, time.monotonic())))
            wait_until(self._rests, what="rest")
        return times

    def _one(self, request_id: str, digests: list[bytes]) -> None:
        client, key = self._client, partial(self._key, request_id, digests)
        reply = client.settled(client.call("LOOKUP", m.Lookup(key(len(digests), None))))
        if reply.hit_tokens:
            assert client.retrieve(key(reply.hit_tokens // CHUNK, 0)) is not None
        if reply.ticket:
            client.call("FREE_LOOKUP_LOCKS", m.TicketRef(reply.ticket))
        client.store(key(len(digests), 0), b"x")

    def _key(self, request_id: str, digests: list[bytes], chunks: int, rank: int | None) -> CacheKey:
        packed = b"".join(digests[:chunks])
        return CacheKey(MODEL, 1, rank, self._namespace, 0, chunks * CHUNK, request_id, digests=packed)

    def _let_absences_pass(self, index: int, digests: list[bytes]) -> None:
        late = [
            at for asked, at in map(self._asked.get, digests, [(index, 0.0)] * len(digests)) if index - asked > SOON
        ]
        time.sleep(max(max(late, default=0.0) + HOLD_S + 0.1 - time.monotonic(), 0.0))

    def _rests(self) -> bool:
        status = self._client.status()
        l1 = status["l1"]
        return (
            not any(tier["write_pending"] or tier["pending_calls"] for tier in status["l2"])
            and not status["prefetch"]["in_flight"]
            and not status["tickets"]
            and not l1["pins"]
            and l1["used_bytes"] <= self._high * l1["capacity_bytes"]
        )


def counters(status: Any) -> dict[str, Any]:
    """Return all of a status document that does not depend on the clock."""
    return {
        "lookups": status["lookups"],
        "prefetch": status["prefetch"],
        "tickets": status["tickets"],
        "l1": {name: value for name, value in status["l1"].items() if name not in OF_TIME["l1"]},
        "l2": [{name: value for name, value in tier.items() if name not in OF_TIME["l2"]} for tier in status["l2"]],
    }


def both(trace: MadeTrace, *settings: str, tiers: tuple[TierSpeed, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the counters of a server with these settings, and of the simulator."""
    settings = (f"server.chunk_size={CHUNK}", *settings)
    config = load_config(overrides=[*settings, f"l1.capacity={CAPACITY}"], environ={})
    with ServerProcess(*settings, capacity=CAPACITY) as server, server.client() as client:
        times = RealEngine(client, config.l1.keys.high_watermark).serve(trace)
        real = counters(client.status())
    at_the_times = Settings(config, bytes_per_token=BYTES_PER_TOKEN, tiers=tiers)
    return real, counters(simulate(trace.at(times), at_the_times, PluginRegistry()).status)
