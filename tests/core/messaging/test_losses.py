"""What a client lost comes to its server once, whatever answers are lost; and what a server believes of it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframework.api.requests import ClientInfo
from kvframework.errors import InvalidPayload
from kvframework.messaging.client.liveness import Reports
from kvframework.service.usage_counts import MAX_RECENT, RECENT_S, ClientLosses
from kvframework.wire.frames import decode
from kvframework.wire.messages import MAX_LOST, MOST_LOST, Lost, Ping


@dataclass
class Session(ClientInfo):
    session_id: int = 1
    pid: int = 7
    name: str = "engine"
    local: bool = True


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(["lookups", "loads", "stores"]), st.integers(0, 30)),
        st.tuples(st.sampled_from(["heard and told", "heard", "new session"])),
    ),
    max_size=60,
)


@given(STEPS)
@settings(deadline=None)
def test_what_was_lost_is_counted_once(steps: list[tuple[object, ...]]) -> None:
    """PINGs that were heard and whose answers were not are told again, in the same session; before a new one all that
    was heard was answered."""
    reports, server = Reports(), ClientLosses()
    session, expected, calls = Session(), dict.fromkeys(("lookups", "loads", "stores"), 0), 0
    reports.begin()

    def heard() -> Ping:
        ping = reports.ping()
        server.heard(session, ping.lost)
        return ping

    for step in steps:
        match step:
            case ("add", str(kind), int(code)):
                reports.lost(kind, f"code.{code}", 10)  # type: ignore[arg-type]
                expected[kind] += 1
                calls += 1
            case ("heard and told",):
                reports.answered(heard())
            case ("heard",):
                heard()
            case ("new session",):
                reports.answered(heard())
                server.end_session(session.session_id)
                session = Session(session.session_id + 1)
                reports.begin()
        assert len(reports.ping().lost) <= MAX_LOST
    reports.answered(heard())
    assert reports.ping() == Ping()
    status = server.status()
    assert {kind: status[kind] for kind in expected} == expected
    assert status["bytes"] == 10 * calls


def test_what_came_while_an_answer_was_on_its_way_is_told_next() -> None:
    reports = Reports()
    reports.begin()
    reports.lost("stores", "run.deadline", 5)
    first = reports.ping()
    reports.lost("stores", "run.deadline", 5)
    reports.answered(first)
    assert reports.ping().lost == (Lost("run.deadline", stores=2, nbytes=10),)
    reports.begin()
    assert reports.ping().lost == (Lost("run.deadline", stores=1, nbytes=5),)


@pytest.mark.parametrize(
    "wrong", [{"stores": -1}, {"stores": MOST_LOST + 1}, {"nbytes": (1 << 64) - 1}, {"code": "x" * 65}]
)
def test_amounts_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    payload = msgspec.msgpack.encode({"lost": [{"code": "c", **wrong}]})
    with pytest.raises(InvalidPayload):
        decode(payload, Ping, where="PING")
    with pytest.raises(InvalidPayload):
        decode(msgspec.msgpack.encode({"lost": [{"code": "c"}] * (MAX_LOST + 1)}), Ping, where="PING")


def test_a_client_counts_for_itself_only_and_never_backwards() -> None:
    server = ClientLosses()
    server.heard(Session(1, name="one"), [Lost("c", stores=5)])
    server.heard(Session(2, name="two"), [Lost("c", stores=3)])
    server.heard(Session(1, name="one"), [Lost("c", stores=1)])
    assert server.status()["stores"] == 8
    assert [(each["client"], each["stores"]) for each in server.status()["recent"]] == [("two", 3), ("one", 5)]
    server.heard(Session(1, name="one"), [Lost("c", stores=6)])
    assert server.status()["stores"] == 9


def test_nothing_that_clients_say_grows_without_end() -> None:
    server = ClientLosses()
    for number in range(1, 4 * MAX_RECENT):
        for _ in range(3):
            server.heard(Session(number), [Lost("c", stores=MOST_LOST, nbytes=MOST_LOST)])
    status = server.status()
    assert (status["stores"], status["bytes"]) == (MOST_LOST, MOST_LOST)
    assert len(status["recent"]) == MAX_RECENT
    for number in range(500):
        server.heard(Session(1), [Lost(f"code.{number}.{each}", loads=1) for each in range(MAX_LOST)])
    assert server.status()["loads"] <= 2 * MAX_LOST
    msgspec.json.encode(server.status())


def test_what_is_recent_passes_and_the_sums_stay() -> None:
    now = [100.0]
    server = ClientLosses(lambda: now[0])
    server.heard(Session(), [Lost("run.deadline", stores=2, nbytes=8)])
    server.end_session(1)
    now[0] += RECENT_S
    (recent,) = server.status()["recent"]
    assert (recent["codes"], recent["ago_s"], recent["pid"]) == ({"run.deadline": 2}, RECENT_S, 7)
    now[0] += 1
    assert server.status()["recent"] == []
    assert server.status()["stores"] == 2
