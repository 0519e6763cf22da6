"""The harness itself: which reports it takes for violations, its schedule of faults, and how it finds late waits."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.api.futures import Future, Promise
from kvframework.errors import DeadlineExceeded
from kvframework.wire.protocol import LOCAL
from tests.core.chaos import watch
from tests.core.chaos.events import Complaint, Event, TimedOut
from tests.core.chaos.faults import Faults
from tests.core.chaos.ledger import AFTERMATH_S, MOST_TIMEOUTS, Ledger
from tests.core.chaos.schedule import LANES, draw
from tests.core.chaos.strangers import STRANGERS
from tests.support.waiting import wait_until

KINDS = {kind.name for lane in LANES for kind in lane.kinds}
ENDS_SERVER = {kind.name for lane in LANES for kind in lane.kinds if kind.ends_server}


def late(ledger: Ledger, engine: int, after: float = 0.0) -> str:
    """Report a late call of engine `engine`, `after` seconds from now, and return the violation."""
    now = time.monotonic() + after
    ledger.hear(engine, Complaint("it came late", now, now, excuses=("stop_engine", "stop_server")))
    return ledger.violation


def test_a_fault_explains_what_is_said_of_its_time_and_of_its_engine() -> None:
    ledger = Ledger()
    with ledger.work("stop_engine", 1):
        assert not late(ledger, 1)
        assert late(ledger, 2) == "engine 2: it came late"
    assert ledger.failed.is_set()
    ledger.violate("another")
    assert ledger.violation == "engine 2: it came late", "the first one stays"
    ledger = Ledger()
    with ledger.work("stop_server"):
        assert not late(ledger, 1)
    assert not late(ledger, 1, AFTERMATH_S / 2)
    assert late(ledger, 1, AFTERMATH_S + 1)
    ledger = Ledger()
    with ledger.work("flush_redis"):
        assert late(ledger, 1), "another fault explains nothing"


def test_no_fault_explains_wrong_bytes() -> None:
    ledger = Ledger()
    with ledger.work("stop_engine", 1), ledger.work("kill_server"):
        now = time.monotonic()
        ledger.hear(1, Complaint("WRONG BYTES", now, now))
    assert ledger.violation == "engine 1: WRONG BYTES"


def test_an_engine_waits_for_a_stopped_server_a_few_times_only() -> None:
    for times in (MOST_TIMEOUTS, MOST_TIMEOUTS + 1):
        ledger = Ledger()
        with ledger.work("stop_server"):
            for _ in range(times):
                ledger.hear(1, TimedOut("LOOKUP", time.monotonic()))
        ledger.check_silences()
        assert bool(ledger.violation) is (times > MOST_TIMEOUTS)


@given(st.integers(0, (1 << 32) - 1), st.floats(0.0, 400.0))
def test_the_schedule_follows_from_the_seed_and_keeps_its_lanes_apart(seed: int, seconds: float) -> None:
    faults = draw(seed, seconds)
    assert faults == draw(seed, seconds) == sorted(faults, key=lambda fault: (fault.at, fault.lane))
    for lane in LANES:
        own = [fault for fault in faults if fault.lane == lane.name]
        assert all(one.at + one.seconds < other.at for one, other in itertools.pairwise(own))
        assert not own or own[-1].at + own[-1].seconds < seconds
    assert all(fault.at < seconds / 2 for fault in faults if fault.kind in ENDS_SERVER)
    assert {fault.kind for fault in draw(seed, 400.0)} == KINDS
    assert draw(seed + 1, 400.0) != draw(seed, 400.0)


def test_every_kind_can_be_done() -> None:
    for kind in KINDS:
        assert kind in STRANGERS or kind.startswith("wire_") or hasattr(Faults, f"_{kind}"), kind


class Client:
    """Its future is the test's, and its requests take 0.2 s in vain."""

    def __init__(self) -> None:
        self.deadlines = LOCAL.scaled(0.5)
        self.future: Promise[Any] = Promise()
        self._connection = self

    def begin(self, name: str, payload: object, *, timeout: float, turn: float) -> Future[Any]:
        return self.future

    def request(self, name: str, payload: object, *, timeout: float | None = None) -> object:
        time.sleep(0.2)
        raise DeadlineExceeded("never")


Watched = tuple[Any, watch.Watch, list[Event], Callable[[], list[str]]]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """A client, its watch, what that says, and the texts of the complaints in it."""
    monkeypatch.setattr(watch, "ALLOWANCE_S", 0.05)
    client, told = Client(), list[Event]()
    watching = watch.Watch(client, told.append)  # type: ignore[arg-type]
    return client, watching, told, lambda: [event.text for event in told if isinstance(event, Complaint)]


def test_a_future_that_never_comes_is_told_once(watched: Watched) -> None:
    client, watching, told, texts = watched
    client.begin("LOOKUP", None, timeout=0.01)
    wait_until(lambda: told, what="the complaint")
    assert texts()[0].startswith("the future of LOOKUP is pending")
    watching.check_nothing_is_pending()
    assert texts()[1:] == ["futures of a closed client are pending: LOOKUP"]


def test_a_future_that_comes_late_is_told(watched: Watched) -> None:
    client, watching, _, texts = watched
    client.begin("LOOKUP", None, timeout=-10.0).set_result(None)
    assert any(text.startswith("the future of LOOKUP came") for text in texts())
    before = len(texts())
    watching.check_nothing_is_pending()
    assert len(texts()) == before


def test_a_call_that_takes_longer_than_it_may_is_told(watched: Watched) -> None:
    client, watching, told, texts = watched
    with pytest.raises(DeadlineExceeded):
        client.request("LOOKUP", None)
    assert isinstance(told[0], TimedOut)
    assert texts()[0].startswith("the call LOOKUP came")
    assert watching.failures == {DeadlineExceeded.code: 1}
    told.clear()
    with pytest.raises(DeadlineExceeded):
        client.request("LOOKUP", None, timeout=20.0)
    watching.check_nothing_is_pending()
    assert not texts()
