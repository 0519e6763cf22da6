"""Answers of lookups that are held back: one question instead of many, the hit that grows, and every end of a wait."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvframework.api.futures import Promise
from kvframework.api.requests import CacheKey, Message
from kvframework.api.tier import TierProvider, hookimpl
from kvframework.client import KVClient, RequestHashes, SchedulerAdapter
from kvframework.client.scheduler import POLL_S
from kvframework.server import Server
from kvframework.service.lookups import MOST_OF_TICKET, LookupWaits, Wait
from kvframework.storage.l2 import loading
from kvframework.wire import messages as m
from kvframework.wire.protocol import SINCE_0_3
from tests.core.server.in_process import serving
from tests.core.storage.tier import MemoryTier
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

CHUNK = 256
TOKENS = list(range(8 * CHUNK))
NEVER_STORED = list(range(1, 8 * CHUNK + 1))


class Plugin:
    """A tier whose calls a test holds up."""

    def __init__(self) -> None:
        self.tier = MemoryTier()

    @hookimpl
    def kvf_tiers(self) -> list[TierProvider]:  # type: ignore[type-arg]
        return [TierProvider(name="held", summary="", create=lambda _options, _context: self.tier)]


class Node:
    """A server whose tier has TOKENS, and whose L1 has none of them."""

    def __init__(self, server: Server, tier: MemoryTier, client: WireClient) -> None:
        self.server, self.tier, self.client = server, tier, client
        self.registered = client.register()
        self.key, self.other = (key_for(self.registered, tokens) for tokens in (TOKENS, NEVER_STORED))
        for end in range(CHUNK, len(TOKENS) + CHUNK, CHUNK):
            client.store(key_for(self.registered, TOKENS[:end], start=end - CHUNK), bytes([end // CHUNK]))
        wait_until(lambda: client.status()["l2"][0]["write_pending"] == 0, what="the write to L2")
        assert client.call("CLEAR", m.Clear()).in_use == 0

    @property
    def waits(self) -> int:
        return len(self.server.service.lookups.waits)

    def waits_for_ever(self) -> None:
        """Await a wait, whose time never comes from now on."""
        wait_until(lambda: self.waits == 1, what="the wait")
        waits = self.server.service.lookups.waits
        for number in list(waits._waits):
            waits._times.discard(number)

    def begin(self, key: CacheKey, wait_s: float = 1.0) -> int:
        return self.client.send("LOOKUP", m.Lookup(key, wait_s))


def hashes(client: KVClient) -> RequestHashes:
    request = RequestHashes(client.hasher, CHUNK, request_id="r")
    request.extend(TOKENS)
    return request


@pytest.fixture
def loads() -> int:
    return 1


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, loads: int) -> Iterator[Node]:
    monkeypatch.setattr(loading, "BATCH_OBJECTS", 2)
    plugin = Plugin()
    with (
        serving("l2.0.use=held", "l2.0.timeout_s=60.0", f"l2.0.loads={loads}", plugins=(plugin,)) as server,
        WireClient(server.endpoint) as client,
    ):
        try:
            yield Node(server, plugin.tier, client)
        finally:
            plugin.tier.resume()


def test_a_prompt_that_l2_lacks_takes_one_question(node: Node) -> None:
    reply = node.client.answer(node.begin(node.other), "LOOKUP")
    assert reply == m.LookupReply(0), "nothing is pending, no ticket is left"
    again = node.client.call("LOOKUP", m.Lookup(node.other))
    assert again == m.LookupReply(0), "remembered: the tier is not asked once more"
    assert node.tier.asked("contains")[-8:] != node.tier.asked("contains")[-16:-8]
    assert node.client.status()["tickets"] == node.waits == 0


def test_a_lookup_is_answered_once_the_tier_has_said_what_it_has(node: Node) -> None:
    node.tier.stall("get")
    reply = node.client.answer(node.begin(node.key), "LOOKUP")
    assert (reply.hit_tokens, reply.pending) == (0, True), "the load goes on, and was not waited for"
    node.tier.resume()
    query = m.PrefetchQuery(reply.ticket, 1.0)
    while (last := node.client.call("QUERY_PREFETCH_STATUS", query)).pending:
        pass
    assert last.hit_tokens == len(TOKENS)
    assert node.client.call("FREE_LOOKUP_LOCKS", m.TicketRef(reply.ticket)).pins == 8


def test_a_wait_ends_at_its_time(node: Node) -> None:
    node.tier.stall("contains")
    reply = node.client.answer(node.begin(node.key, 0.05), "LOOKUP")
    assert reply.pending
    assert node.client.call("QUERY_PREFETCH_STATUS", m.PrefetchQuery(reply.ticket, 0.05)).pending
    assert node.waits == 0


def test_the_hit_grows_with_what_arrives_and_is_pinned(node: Node) -> None:
    honest, turns = node.tier.get_into, threading.Semaphore(0)

    def in_turn(*arguments: object, **named: object) -> object:
        turns.acquire()
        return honest(*arguments, **named)  # type: ignore[arg-type]

    node.tier.get_into = in_turn  # type: ignore[method-assign,assignment]
    reply = node.client.answer(node.begin(node.key), "LOOKUP")
    for chunks in (2, 4, 6, 8):
        query = m.PrefetchQuery(reply.ticket, 1.0, (chunks - 2) * CHUNK)
        number = node.client.send("QUERY_PREFETCH_STATUS", query)
        wait_until(lambda: node.waits == 1, what="the wait")
        turns.release()
        last = node.client.answer(number, "QUERY_PREFETCH_STATUS")
        assert last.hit_tokens == chunks * CHUNK
        assert node.client.retrieve(key_for(node.registered, TOKENS[: last.hit_tokens])) is not None
        assert node.client.call("CLEAR", m.Clear()).objects == 0, "it is pinned"


def test_others_are_served_while_an_answer_is_held_back(node: Node) -> None:
    node.tier.stall("contains")
    held = node.begin(node.key)
    wait_until(lambda: node.waits == 1, what="the wait")
    with WireClient(node.server.endpoint) as other:
        assert other.status()["tickets"] == 1
    node.tier.resume()
    assert node.client.answer(held, "LOOKUP").ticket


def test_few_wait_for_one_ticket(node: Node) -> None:
    """Each of them is work whenever the ticket changes; one client could ask thousands of times."""
    node.tier.stall("contains")
    ticket = node.client.answer(node.begin(node.key, 0.05), "LOOKUP").ticket
    query = m.PrefetchQuery(ticket, 1.0)
    held = [node.client.send("QUERY_PREFETCH_STATUS", query) for _ in range(MOST_OF_TICKET)]
    assert node.client.call("QUERY_PREFETCH_STATUS", query).pending, "answered at once"
    assert node.waits <= MOST_OF_TICKET
    node.tier.resume()
    assert {node.client.answer(number, "QUERY_PREFETCH_STATUS").hit_tokens for number in held} <= {0, len(TOKENS)}


def test_a_server_that_stops_holds_no_answer_back(node: Node) -> None:
    node.tier.stall("contains")
    held = node.begin(node.key)
    node.waits_for_ever()
    node.server.stop()
    assert node.client.answer(held, "LOOKUP").pending


def test_two_clients_wait_for_the_same_load(node: Node) -> None:
    node.tier.stall("get")
    with WireClient(node.server.endpoint) as other:
        clients = (node.client, other)
        tickets = [each.answer(each.send("LOOKUP", m.Lookup(node.key, 1.0)), "LOOKUP").ticket for each in clients]
        queries = [
            each.send("QUERY_PREFETCH_STATUS", m.PrefetchQuery(ticket, 1.0))
            for each, ticket in zip(clients, tickets, strict=True)
        ]
        wait_until(lambda: node.waits == 2, what="both waits")
        assert node.client.call("FREE_LOOKUP_LOCKS", m.TicketRef(tickets[0]))
        assert not node.client.answer(queries[0], "QUERY_PREFETCH_STATUS").ticket
        node.tier.resume()
        while (last := other.answer(queries[1], "QUERY_PREFETCH_STATUS")).pending:
            queries[1] = other.send("QUERY_PREFETCH_STATUS", m.PrefetchQuery(tickets[1], 1.0))
        assert last.hit_tokens == len(TOKENS)
        assert other.status()["l1"]["pins"] == 8


@pytest.mark.parametrize("end", ["death", "END_SESSION", "CANCEL"])
def test_a_wait_ends_with_its_client_or_request(node: Node, end: str) -> None:
    node.tier.stall("contains")
    with WireClient(node.server.endpoint) as watcher:
        held = node.begin(node.key)
        node.waits_for_ever()
        if end == "death":
            node.client.close()
        elif end == "END_SESSION":
            assert node.client.call(end, m.EndSession()).tickets == 1
            assert node.client.answer(held, "LOOKUP") == m.LookupReply(0)
        else:
            assert node.client.call(end, m.Cancel(request=held)).found, "and its ticket, which nobody knows"
        wait_until(lambda: watcher.status()["tickets"] == node.waits == 0, what="the end")
        node.tier.resume()
        wait_until(lambda: watcher.status()["prefetch"]["in_flight"] == 0, what="the end of the load")
        assert watcher.status()["l1"]["pins"] == 0


@pytest.mark.parametrize("loads", [1, 2])
def test_a_client_takes_what_arrives_in_prefix_order_though_batches_overtake_each_other(node: Node, loads: int) -> None:
    honest, numbers, second_is_here = node.tier.get_into, itertools.count(1), threading.Event()

    def overtaken(*arguments: Any, **named: Any) -> Any:
        number = next(numbers)
        assert number > 1 or loads == 1 or second_is_here.wait(20.0)
        answers = honest(*arguments, **named)
        if number > 1:
            second_is_here.set()
        return answers

    node.tier.get_into = overtaken  # type: ignore[method-assign]
    with KVClient(node.server.endpoint) as client:
        assert client.wait_up(20.0)
        scheduler = SchedulerAdapter(client, model_name=node.key.model_name, namespace=node.registered.namespace)
        results = []
        for found in scheduler.arrivals(scheduler.lookup(hashes(client), wait_s=1.0), 20.0):
            results.append(found)
            chunks = found.hit_tokens // CHUNK
            if chunks:
                taken = node.client.retrieve(key_for(node.registered, TOKENS[: found.hit_tokens]))
                assert taken is not None, "it is pinned"
                assert taken == b"".join(bytes([chunk + 1]) * (len(taken) // chunks) for chunk in range(chunks))
        # The last one may say no more than that the one before was all.
        growing = [each.hit_tokens for each in results if each.pending]
        assert growing == sorted(set(growing))
        assert (results[-1].hit_tokens, results[-1].pending) == (len(TOKENS), False)
        scheduler.free(results[-1])
        wait_until(lambda: node.client.status()["l1"]["pins"] == 0, what="no pin")


@pytest.mark.parametrize("loads", [1, 2])
def test_a_deadline_leaves_what_has_arrived(node: Node, loads: int) -> None:
    honest, numbers, over = node.tier.get_into, itertools.count(1), threading.Event()

    def held(*arguments: Any, **named: Any) -> Any:
        if next(numbers) > 1:
            over.wait(20.0)
        return honest(*arguments, **named)

    node.tier.get_into = held  # type: ignore[method-assign]
    with KVClient(node.server.endpoint) as client:
        assert client.wait_up(20.0)
        scheduler = SchedulerAdapter(client, model_name=node.key.model_name, namespace=node.registered.namespace)
        *_, last = scheduler.arrivals(scheduler.lookup(hashes(client), wait_s=1.0), 0.2)
        assert last.pending
        assert last.hit_tokens in (0, 2 * CHUNK)
        scheduler.free(last)
        over.set()
        wait_until(lambda: not node.client.status()["prefetch"]["in_flight"], what="the end of the load")
        wait_until(lambda: node.client.status()["l1"]["pins"] == 0, what="no pin")
        assert node.client.status()["tickets"] == 0


def test_a_client_asks_an_older_server_again_and_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvframework.service.cache_service.FEATURES", ())
    with KVClient(node.server.endpoint) as client:
        assert client.wait_up(20.0)
        assert SINCE_0_3 not in client.hello.features
        scheduler = SchedulerAdapter(client, model_name=node.key.model_name, namespace=node.registered.namespace)
        request = hashes(client)
        node.tier.stall("get")
        asked = scheduler.lookup(request, wait_s=1.0)
        assert asked.pending
        assert scheduler.wait(asked, 0.02).pending
        node.tier.resume()
        found = scheduler.wait(asked, 20.0)
        assert (found.hit_tokens, found.pending) == (len(TOKENS), False)
        assert list(scheduler.arrivals(found, 1.0)) == [found]
        scheduler.free(found)


def test_a_client_does_not_spin_if_its_answers_are_not_held_back(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with KVClient(node.server.endpoint) as client:
        assert client.wait_up(20.0)
        scheduler = SchedulerAdapter(client, model_name=node.key.model_name, namespace=node.registered.namespace)
        node.tier.stall("get")
        asked = scheduler.lookup(hashes(client), wait_s=1.0)
        questions: list[str] = []

        def none(_waits: LookupWaits, ticket: str) -> bool:
            questions.append(ticket)
            return False

        monkeypatch.setattr(LookupWaits, "has_room", none)
        assert scheduler.wait(asked, 0.1).pending
        assert 0 < len(questions) <= 0.1 / POLL_S + 1
        scheduler.free(asked)


def test_a_dead_server_ends_a_wait() -> None:
    """No spinning: a question that fails is followed by a pause."""
    plugin = Plugin()
    with serving("l2.0.use=held", plugins=(plugin,)) as server, WireClient(server.endpoint) as wire:
        node = Node(server, plugin.tier, wire)
        plugin.tier.stall("contains")
        client = KVClient(server.endpoint)
        assert client.wait_up(20.0)
        scheduler = SchedulerAdapter(client, model_name=node.key.model_name, namespace=node.registered.namespace)
        asked = scheduler.lookup(hashes(client))
        plugin.tier.resume()
    with client:
        assert scheduler.wait(asked, 0.1).hit_tokens == 0
        assert 0 < scheduler.failures < 100


def test_who_waits_for_the_end_is_not_woken_by_what_arrives() -> None:
    """Each batch of a load would wake the serving thread in vain; one that wants to know of more is woken."""
    waits, woken = LookupWaits(), list[str]()
    waits.wake = lambda: woken.append("")

    def add(*, more_than: int) -> int:
        wait = Wait(Promise[Message](), 1, "t", math.inf, more_than=more_than)
        waits.add(wait)
        return max(waits._waits)

    add(more_than=-1)
    waits.grown("t")
    assert not woken
    waits.changed("t")
    assert len(woken) == 1
    more = add(more_than=0)
    waits.grown("t")
    waits.grown("another")
    assert len(woken) == 2
    waits.end(more)
    waits.grown("t")
    assert len(woken) == 2
