"""The simulator against a real server, by eviction and write policy: the same counters, number by number."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvf_plan.simulation import Settings, TierSpeed, simulate
from kvf_plan.simulation.chunks import Chunks
from kvf_plan.simulation.node import MODEL
from kvframework.api.keys import CacheKey
from kvframework.config.load import load_config
from kvframework.registry.registry import PluginRegistry
from kvframework.storage.l2.tier_calls import HOLD_S
from kvframework.wire import messages as m
from tests.core.registry.fake_distributions import install
from tests.plan.planning.traces import MadeTrace
from tests.plan.simulate.made import SOON, made_trace
from tests.support.redis_server import RedisServer
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
    return {
        "lookups": status["lookups"],
        "prefetch": status["prefetch"],
        "tickets": status["tickets"],
        "l1": {name: value for name, value in status["l1"].items() if name not in OF_TIME["l1"]},
        "l2": [{name: value for name, value in tier.items() if name not in OF_TIME["l2"]} for tier in status["l2"]],
    }


def both(trace: MadeTrace, *settings: str, tiers: tuple[TierSpeed, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    settings = (f"server.chunk_size={CHUNK}", *settings)
    config = load_config(overrides=[*settings, f"l1.capacity={CAPACITY}"], environ={})
    with ServerProcess(*settings, capacity=CAPACITY) as server, server.client() as client:
        times = RealEngine(client, config.l1.keys.high_watermark).serve(trace)
        real = counters(client.status())
    at_the_times = Settings(config, bytes_per_token=BYTES_PER_TOKEN, tiers=tiers)
    return real, counters(simulate(trace.at(times), at_the_times, PluginRegistry()).status)


EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "kvf-s3fifo"
EVICTIONS = ("lru", "two_queues", "s3fifo")


@pytest.fixture
def s3fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example's distribution, as pip would install it."""
    entry_points = dict(re.findall(r'^"([\w.]+)" = "(\w+)"$', (EXAMPLE / "pyproject.toml").read_text(), re.MULTILINE))
    site = tmp_path / "site"
    site.mkdir()
    install(site, "kvf-s3fifo", entry_points, {"kvf_s3fifo": (EXAMPLE / "kvf_s3fifo.py").read_text()})
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))
    yield
    sys.modules.pop("kvf_s3fifo", None)


@pytest.mark.usefixtures("s3fifo")
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_l1_alone(eviction: str) -> None:
    real, simulated = both(made_trace(200, CHUNK), f"l1.eviction.use={eviction}")
    assert real == simulated
    assert real["l1"]["evictions"] > 200
    assert real["lookups"]["by_model"][MODEL]["l1_tokens"] > 1000


# Settings with which the numbers are those of any run: what leaves at a watermark depends on when the server ticks
# unless it leaves in the order of its last use and of its writes, and no more than has to.
POLICIES = {
    "write_through": (),
    "write_through_selective": (),
    "write_back": ("l1.high_watermark=0.8", "l1.low_watermark=0.8", "l2.0.writes=1"),
}
BOTH = [
    (eviction, policy)
    for eviction in EVICTIONS
    for policy in POLICIES
    if policy == "write_through" or eviction == "lru"
]


@pytest.mark.usefixtures("s3fifo")
@pytest.mark.parametrize(("eviction", "policy"), BOTH)
def test_l1_and_a_tier(eviction: str, policy: str, tmp_path: Path) -> None:
    tier = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}", f"l2.0.write_policy={policy}")
    settings = (f"l1.eviction.use={eviction}", *tier, *POLICIES[policy])
    real, simulated = both(made_trace(150, CHUNK), *settings, tiers=(TierSpeed("filesystem", 1e9),))
    assert real == simulated
    assert real["l2"][0]["hits"] >= 50
    assert real["lookups"]["by_model"][MODEL]["l2_tokens"] > 500


def test_l1_and_redis(tmp_path: Path) -> None:
    with RedisServer(tmp_path, unix=True) as redis:
        tier = ("l1.eviction.use=lru", "l2.0.use=redis", f"l2.0.url={redis.url}")
        real, simulated = both(made_trace(150, CHUNK), *tier, tiers=(TierSpeed("redis", 1e9),))
    assert real == simulated
    assert real["l2"][0]["hits"] >= 50
