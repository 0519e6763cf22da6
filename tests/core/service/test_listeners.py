"""Listeners of a server: each has a thread, and none harms another one, the status or the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping

import pytest

from kvframework.api.listener import Listener, Records
from kvframework.record_ring import RecordRing
from kvframework.service import listeners as module
from kvframework.service.listeners import Listeners
from tests.support.waiting import wait_until

KEYS = [b"k"]


class Counting(Listener):
    def __init__(self) -> None:
        self.received = 0

    def listen(self, records: Records) -> None:
        for batch in records:
            self.received += len(batch.records)

    def status(self) -> Mapping[str, object]:
        return {"received": self.received}


class Failing(Counting):
    def listen(self, records: Records) -> None:
        for _ in records:
            raise ValueError("broken")


class Stuck(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def listen(self, records: Records) -> None:
        self.goes_on.wait()


class Secretive(Counting):
    wants = "salted"

    def status(self) -> Mapping[str, object]:
        raise OSError("no status")


class Foreign(Counting):
    def status(self) -> Mapping[str, object]:
        return {"a lock": threading.Lock()}


@pytest.fixture
def listeners() -> Iterator[Listeners]:
    made = Listeners(RecordRing(wanted=True))
    yield made
    made.stop(handed_over=False)


def test_one_that_fails_is_a_problem_and_others_hear_on(listeners: Listeners) -> None:
    good = Counting()
    listeners.add("bad", Failing())
    listeners.add("good", good)
    listeners.start(keeps=False)
    listeners.ring.added(KEYS)
    wait_until(lambda: "broken" in str(listeners.status("bad").get("problem")), what="the problem")
    listeners.ring.added(KEYS)
    wait_until(lambda: good.received == 2, what="both records")
    assert listeners.others()["good"] == {"received": 2}


def test_one_that_returns_too_early_is_a_problem(listeners: Listeners) -> None:
    stuck = Stuck()
    stuck.goes_on.set()
    listeners.add("early", stuck)
    listeners.start(keeps=False)
    wait_until(lambda: listeners.status("early").get("problem"), what="the problem")


def test_one_that_is_stuck_delays_the_end_by_the_bound_alone(
    listeners: Listeners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_S", 0.2)
    stuck, good = Stuck(), Counting()
    listeners.add("stuck", stuck)
    listeners.add("good", good)
    listeners.start(keeps=False)
    listeners.ring.added(KEYS)
    began = time.monotonic()
    listeners.stop(handed_over=False)
    assert time.monotonic() - began < 5
    wait_until(lambda: good.received == 1, what="the record")
    stuck.goes_on.set()


@pytest.mark.parametrize("listener", [Secretive(), Foreign()], ids=["raises", "no JSON"])
def test_a_status_that_fails_is_a_problem_of_its_listener(listeners: Listeners, listener: Listener) -> None:
    listeners.add("one", listener)
    listeners.add("two", Counting())
    found = listeners.others()
    assert "the listener's status failed:" in str(found["one"])
    assert found["two"] == {"received": 0}


def test_contents_are_asked_for_if_one_wants_them(listeners: Listeners) -> None:
    listeners.add("one", Counting())
    assert listeners.features == ()
    assert not listeners.ring.wants_contents
    listeners.add("two", Secretive())
    assert listeners.features == ("token_ids", "token_ids.salted")
    assert listeners.ring.wants_contents
