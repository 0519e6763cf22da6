"""What has arrived is taken while the rest arrives, from a Redis that dies, stops or answers out of order meanwhile: in
prefix order, pinned, and no byte is wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvf_redis.tier import RedisTier
from kvframework.client import KVClient, LookupResult, RequestHashes, SchedulerAdapter
from kvframework.storage.l2 import loading
from kvframework.wire import messages as m
from tests.core.server.in_process import serving
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

pytestmark = pytest.mark.redis

CHUNK, CHUNKS = 256, 8
TOKENS = list(range(CHUNKS * CHUNK))
TIMEOUT_S = 1.0


class Node:
    """A server that has everything in Redis and nothing in L1; `get` takes the place of the tier's reads."""

    def __init__(self, wire: WireClient, client: KVClient, monkeypatch: pytest.MonkeyPatch, loads: int) -> None:
        self.wire = wire
        self.loads = loads
        self.registered = wire.register()
        for chunk in range(CHUNKS):
            wire.store(self.key(chunk, chunk + 1), bytes([chunk + 1]))
        wait_until(lambda: wire.status()["l2"][0]["write_pending"] == 0, what="the write to Redis")
        assert wire.call("CLEAR", m.Clear()).in_use == 0
        assert client.wait_up(20.0)
        self.scheduler = SchedulerAdapter(client, model_name="tiny", namespace=self.registered.namespace)
        self.request = RequestHashes(client.hasher, CHUNK, request_id="r")
        self.request.extend(TOKENS)
        self.calls = 0
        honest, lock = RedisTier.get_into, threading.Lock()
        self.get: Callable[[int, Callable[[], Any]], Any] = lambda _number, get: get()

        def counted(tier: RedisTier, *arguments: Any, **named: Any) -> Any:
            with lock:
                self.calls += 1
                number = self.calls
            return self.get(number, lambda: honest(tier, *arguments, **named))

        monkeypatch.setattr(RedisTier, "get_into", counted)

    def key(self, first: int, end: int) -> Any:
        return key_for(self.registered, TOKENS[: end * CHUNK], start=first * CHUNK)

    def arrivals(self, timeout_s: float = 20.0) -> Iterator[LookupResult]:
        """Take each part when it has arrived; what was taken is what was stored."""
        for found in self.scheduler.arrivals(self.scheduler.lookup(self.request, wait_s=1.0), timeout_s):
            chunks = found.hit_tokens // CHUNK
            if chunks:
                taken = self.wire.retrieve(self.key(0, chunks))
                assert taken is not None, "it is pinned"
                each = len(taken) // chunks
                assert taken == b"".join(bytes([chunk + 1]) * each for chunk in range(chunks))
            yield found

    def await_rest(self) -> None:
        wait_until(lambda: not self.wire.status()["prefetch"]["in_flight"], what="the end of the load")
        wait_until(lambda: self.wire.status()["l1"]["pins"] == 0, what="no pin")
        assert self.wire.status()["tickets"] == 0


@pytest.fixture(params=[1, 2])
def node(redis: RedisServer, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Node]:
    monkeypatch.setattr(loading, "BATCH_OBJECTS", 2)
    settings = ("l2.0.use=redis", f"l2.0.url={redis.url}", f"l2.0.timeout_s={TIMEOUT_S}", f"l2.0.loads={request.param}")
    with serving(*settings) as server, WireClient(server.endpoint) as wire, KVClient(server.endpoint) as client:
        yield Node(wire, client, monkeypatch, request.param)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path, unix=True) as server:
        yield server


def test_batches_that_overtake_each_other_are_taken_in_prefix_order(node: Node) -> None:
    second_is_here = threading.Event()

    def get(number: int, honest: Callable[[], Any]) -> Any:
        if number == 1 and node.loads > 1:
            assert second_is_here.wait(20.0)
        answers = honest()
        if number > 1:
            second_is_here.set()
        return answers

    node.get = get
    results = list(node.arrivals())
    # The last one may say no more than that the one before was all.
    growing = [each.hit_tokens for each in results if each.pending]
    assert growing == sorted(set(growing))
    assert results[-1].hit_tokens == len(TOKENS)
    node.scheduler.free(results[-1])
    node.await_rest()


def test_a_deadline_leaves_what_has_arrived(node: Node) -> None:
    over = threading.Event()

    def get(number: int, honest: Callable[[], Any]) -> Any:
        if number > 1:
            over.wait(20.0)
        return honest()

    node.get = get
    *_, last = node.arrivals(0.2)
    assert last.pending
    assert last.hit_tokens in (0, 2 * CHUNK)
    node.scheduler.free(last)
    over.set()
    node.await_rest()
