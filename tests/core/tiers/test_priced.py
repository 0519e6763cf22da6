"""Load or recompute at a real server: what a slow tier has is computed, what a quick one has is loaded, and neither a
pause of the server nor of the tier makes more of it than a moment."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvframework.pricing import SEEDS, EngineSpeed
from kvframework.wire import messages as m
from tests.core.registry.fake_distributions import install
from tests.core.tiers import slowed_tier
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

CHUNK, CHUNKS = 256, 16
TOKENS = CHUNK * CHUNKS
# A whole prompt takes this engine 0.8 s: a quick tier some milliseconds, even on a busy machine, a slow one `SLOW_S`.
ENGINE = EngineSpeed(5_000.0)
SLOW_S = 1.5
_firsts = itertools.count(1_000_000, TOKENS)


class Node:
    """A real server with a slowed tier, and its one engine."""

    def __init__(self, server: ServerProcess, seconds: Path, wire: WireClient) -> None:
        self.server = server
        self.seconds = seconds
        self.wire = wire
        self.registered = wire.register()
        first = next(_firsts)
        self.key = key_for(self.registered, list(range(first, first + TOKENS)))
        wire.store(self.key, b"kv")
        wait_until(lambda: wire.status()["l2"][0]["write_pending"] == 0, what="the write to the tier")

    def slow(self, seconds: float) -> None:
        # In one step: the server may read it at any time.
        fresh = self.seconds.with_suffix(".new")
        fresh.write_text(str(seconds))
        fresh.replace(self.seconds)

    def found(self, speed: EngineSpeed | None = ENGINE) -> int:
        """Look the prompt up, of which L1 has nothing, and return the tokens that come."""
        return self.end(self.begin(speed))

    def begin(self, speed: EngineSpeed | None = ENGINE) -> m.LookupReply:
        # What a load that took long has put into L1 may be held for a moment after its reply.
        wait_until(lambda: not self.wire.call("CLEAR", m.Clear()).in_use, what="an L1 that holds nothing")
        key = msgspec.structs.replace(self.key, worker_id=None)
        reply: m.LookupReply = self.wire.call("LOOKUP", m.Lookup(key, speed=speed))
        return reply

    def end(self, reply: m.LookupReply) -> int:
        reply = self.wire.settled(reply)
        if reply.ticket:
            self.wire.call("FREE_LOOKUP_LOCKS", m.TicketRef(reply.ticket))
        return reply.hit_tokens

    def learned(self) -> Node:
        """It has learned how fast the tier is."""
        for _ in range(SEEDS):
            assert self.found() == TOKENS
        assert self.tier["load_bytes_per_s"] > 0
        return self

    @property
    def tier(self) -> dict[str, float]:
        found: dict[str, float] = self.wire.status()["l2"][0]
        return found

    def last(self) -> m.Finished:
        found: m.Finished = self.wire.call("RECENT", m.Recent()).records[-1]
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    site, seconds = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("tier") / "seconds"
    seconds.write_text("0")
    install(site, "slowed-kvf", {"tier.slowed": slowed_tier.__name__})
    with pytest.MonkeyPatch.context() as patch:
        path = os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", f"{site}{os.pathsep}{path}" if path else str(site))
        settings = ("server.price=true", "l2.0.use=slowed", f"l2.0.seconds={seconds}", "l2.0.timeout_s=60")
        with ServerProcess(*settings) as process:
            yield process, seconds


@pytest.fixture
def node(server: tuple[ServerProcess, Path]) -> Iterator[Node]:
    process, seconds = server
    with process.client(timeout=60.0) as wire:
        node = Node(process, seconds, wire)
        node.slow(0)
        wait_until(lambda: node.found() == TOKENS, 60, "a tier that is quick again")
        yield node.learned()
        node.slow(0)


def test_the_prefill_saved_is_counted_by_model_and_tenant(node: Node) -> None:
    status = node.wire.status()
    saved_s = status["lookups"]["prefill_saved_s"]
    assert saved_s >= SEEDS * ENGINE.prefill_s(0, TOKENS)
    rows = status["use"]["models"]["tiny"], status["use"]["tenants"]["other"]
    assert [row["prefill_saved_s"] for row in rows] == pytest.approx([saved_s] * 2)


def test_what_a_slow_tier_has_is_computed_and_a_quick_one_is_used_again(node: Node) -> None:
    node.slow(SLOW_S)
    wait_until(lambda: node.found() < TOKENS, 60, "a hit that is cut")
    record = node.last()
    assert record.reason == "priced"
    assert record.outcome in ("partial", "miss")
    assert "loading would take" in record.detail
    assert record.load_s > record.compute_s > 0
    price = node.wire.status()["price"]
    assert price["on"]
    assert price["cut"] >= 1
    assert price["cut_tokens"] > 0
    assert price["saved_s"] > 0
    assert [each["tokens_per_s"] for each in price["engines"]] == [ENGINE.tokens_per_s]
    assert node.wire.status()["lookups"]["misses"]["priced"] >= 1

    assert node.found(None) == TOKENS, "an engine that says nothing of its speed loads all"
    assert node.found(EngineSpeed(100.0)) == TOKENS, "a slow engine loads all"

    node.slow(0)
    wait_until(lambda: node.found() == TOKENS, 60, "a tier that is quick again")
    assert not node.last().reason


def test_a_tier_that_stands_still_once_is_used(node: Node) -> None:
    node.slow(4 * SLOW_S)
    reply = node.begin()
    wait_until(lambda: node.tier["pending_calls"], what="a call that stands still")
    node.slow(0)
    assert node.end(reply) == TOKENS
    assert [node.found() for _ in range(5)] == [TOKENS] * 5


def test_a_server_that_is_stopped_loads_afterwards(node: Node) -> None:
    node.slow(0.3)  # so that it is stopped during a call
    reply = node.begin()
    wait_until(lambda: node.tier["pending_calls"], what="a load under way")
    node.server.sigstop()
    time.sleep(3.0)  # what is stopped is long
    node.server.sigcont()
    node.slow(0)
    assert node.end(reply) == TOKENS
    assert [node.found() for _ in range(5)] == [TOKENS] * 5
