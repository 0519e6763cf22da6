"""What a client gives back without waiting for a word: the end of a load, and tickets. An engine that relies on it
never takes bytes that may be foreign."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvframework.wire import messages as m
from kvframework.wire.frames import NO_ANSWER, join
from kvframework.wire.protocol import ONE_WAY_REQUESTS, REQUESTS, SINCE_0_3
from tests.core.client.load_engine import TOKENS, Engine
from tests.support.server_process import ServerProcess, server_fixture
from tests.support.wire_client import WireClient, key_for

server = server_fixture()


@pytest.fixture
def engine(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    with server.engine_client() as client:
        yield Engine(server, [client], monkeypatch, instances=())


def test_a_load_whose_pins_held_for_sure_ends_without_a_question(engine: Engine) -> None:
    plan = engine.load(None)
    assert engine.pins() == 2
    assert plan.commit().result().ok
    assert engine.asked == ["PREPARE_RETRIEVE", "COMMIT_RETRIEVE unanswered"]
    engine.settle(0)
    recent = engine.client.request("RECENT", m.Recent(), m.RecentReply).records
    assert [(each.request, each.outcome) for each in recent] == [("STORE", "stored"), ("RETRIEVE", "hit")]


def test_a_load_that_took_longer_than_its_lease_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    with ServerProcess("server.retrieve_lease_s=0.1") as server, server.engine_client() as client:
        engine = Engine(server, [client], monkeypatch, instances=())
        plan = engine.load(None)
        engine.settle(0)
        assert not plan.commit().result().ok
        assert engine.asked[1:] == ["COMMIT_RETRIEVE"]


def test_a_load_beside_the_end_of_its_request_asks(engine: Engine) -> None:
    plan = engine.load(None)
    engine.scheduler.end_request("r")
    assert engine.pins() == 0
    engine.asked.clear()
    assert not plan.commit().result().ok
    assert engine.asked == ["COMMIT_RETRIEVE"]


def test_a_load_from_a_stopped_server_is_a_hit(engine: Engine) -> None:
    # Nothing can take the place of what it has pinned.
    plan = engine.load(None)
    engine.server.sigstop()
    try:
        assert plan.commit().result().ok
    finally:
        engine.server.sigcont()
    engine.settle(0)


def test_an_older_server_is_asked_as_ever(engine: Engine) -> None:
    assert engine.client.has(SINCE_0_3)
    engine.client._reply = msgspec.structs.replace(engine.client.hello, features=())
    plan = engine.load(None)
    assert plan.commit().result().ok
    found = engine.scheduler.lookup(engine.request)
    assert found.hit_tokens == 512
    engine.scheduler.free(found)
    assert engine.asked == ["PREPARE_RETRIEVE", "COMMIT_RETRIEVE", "FREE_LOOKUP_LOCKS"]
    engine.settle(0)


def test_tickets_end_with_the_next_lookup_or_a_little_later(engine: Engine) -> None:
    first = engine.scheduler.lookup(engine.request)
    engine.scheduler.free(first)
    second = engine.scheduler.lookup(engine.request)
    assert first.ticket != second.ticket
    with pytest.raises(Exception, match="unknown ticket"):
        engine.client.request("FREE_LOOKUP_LOCKS", m.TicketRef(first.ticket), m.Freed)
    engine.scheduler.free(second)
    engine.settle(0)
    assert engine.asked == []


def test_tickets_of_a_lookup_that_failed_are_freed_later(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    found = engine.scheduler.lookup(engine.request)
    engine.client.free_soon(found.ticket)
    taken = engine.client.take_freed() or (found.ticket,)  # a PING may have been faster
    engine.client.free_soon(*taken, "of an ended lookup")
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.client), "usable", property(lambda _: False))
        assert engine.scheduler.lookup(engine.request).hit_tokens == 0
    engine.settle(0)


def test_what_is_aborted_can_be_stored_at_once(engine: Engine) -> None:
    engine.client.request("CLEAR", m.Clear(), m.Cleared)
    for _ in range(120):
        engine.client.prepare_store(engine.transfer()).result().abort()
        again = engine.client.prepare_store(engine.transfer()).result()
        assert (len(again.ranges), again.outcome.in_flight) == (2, 0), "the ABORT came after the next PREPARE_STORE"
        again.abort()


def test_what_is_posted_comes_after_what_was_submitted(engine: Engine) -> None:
    connection = engine.client._connection
    for _ in range(120):
        engine.client.request("CLEAR", m.Clear(), m.Cleared)
        told = engine.client.request("PREPARE_STORE", m.Prepare(engine.key, 7), m.StorePlan)
        committed = connection.begin("COMMIT_STORE", m.Commit(told.lease), timeout=60)
        assert connection.post("ABORT", m.LeaseRef(told.lease))
        reply = committed.result(60).payload
        assert isinstance(reply, m.Committed)
        assert reply.outcome.stored == 2


def test_what_was_freed_makes_room_for_the_next_store(engine: Engine) -> None:
    for _ in range(20):
        found = engine.scheduler.lookup(engine.request)
        assert found.hit_tokens == 512
        engine.scheduler.free(found)
        cleared = engine.client.request("CLEAR", m.Clear(), m.Cleared)
        assert cleared.in_use == 0, "the tickets were freed after the CLEAR"
        with engine.client.prepare_store(engine.transfer()).result() as plan:
            assert plan.commit().result().stored == 2


def unanswered(client: WireClient, name: str, payload: Any) -> None:
    """Send a request that gets no answer, and see that it has none once the next one is answered."""
    client.socket.send_multipart(join(NO_ANSWER, name, payload))
    request_id = client.send("NOOP", m.Empty())
    answered, kind, _ = client.receive()
    assert (answered, kind) == (request_id, "NOOP")


def test_a_request_that_wants_no_answer_gets_none_and_its_error_is_counted(server: ServerProcess) -> None:
    with server.client() as client:
        key = key_for(client.register(), TOKENS)
        client.store(key, b"x")
        ticket = client.lookup(key).ticket
        unanswered(client, "FREE_LOOKUP_LOCKS", m.TicketRef(ticket))
        assert client.status()["l1"]["pins"] == 0
        for name in sorted(ONE_WAY_REQUESTS - {"END_SESSION"}):
            unanswered(client, name, m.TicketRef("x") if name == "FREE_LOOKUP_LOCKS" else m.LeaseRef("x"))
        counters = client.status()["messaging"]["counters"]
        assert counters["errors.request.lease"] == 3


def test_a_request_whose_answer_says_something_needs_one(server: ServerProcess) -> None:
    with server.client() as client:
        refused = sorted(REQUESTS.keys() - ONE_WAY_REQUESTS)
        for name in refused:
            unanswered(client, name, m.Empty())
        assert client.status()["messaging"]["counters"]["errors.protocol.frames"] == len(refused)
