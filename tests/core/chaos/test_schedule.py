"""The schedule of faults: it follows from the seed, keeps its lanes apart and leaves nothing out."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
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
from tests.core.chaos.schedule import LANES, Fault, draw
from tests.core.chaos.strangers import STRANGERS
from tests.support.waiting import wait_until

KINDS = {kind.name for lane in LANES for kind in lane.kinds}
ENDS_SERVER = {kind.name for lane in LANES for kind in lane.kinds if kind.ends_server}

seeds = st.integers(0, (1 << 32) - 1)
lengths = st.floats(0.0, 400.0)


def by_lane(faults: list[Fault]) -> dict[str, list[Fault]]:
    found = defaultdict(list)
    for fault in faults:
        found[fault.lane].append(fault)
    return found


@given(seeds, lengths)
def test_a_seed_gives_one_schedule(seed: int, seconds: float) -> None:
    faults = draw(seed, seconds)
    assert faults == draw(seed, seconds)
    assert faults == sorted(faults, key=lambda fault: (fault.at, fault.lane))


def test_another_seed_gives_another_one() -> None:
    assert len({str(draw(seed, 60.0)) for seed in range(50)}) == 50


@given(seeds, lengths)
def test_faults_of_a_lane_follow_each_other_and_end_in_time(seed: int, seconds: float) -> None:
    for faults in by_lane(draw(seed, seconds)).values():
        for fault, following in itertools.pairwise(faults):
            assert fault.at + fault.seconds < following.at
        assert faults[-1].at + faults[-1].seconds < seconds


@given(seeds, lengths)
def test_no_server_is_killed_in_the_second_half(seed: int, seconds: float) -> None:
    assert all(fault.at < seconds / 2 for fault in draw(seed, seconds) if fault.kind in ENDS_SERVER)


@given(seeds)
def test_each_kind_comes_within_some_minutes(seed: int) -> None:
    assert {fault.kind for fault in draw(seed, 400.0)} == KINDS


def test_every_kind_can_be_done() -> None:
    for kind in KINDS:
        assert kind in STRANGERS or kind.startswith("wire_") or hasattr(Faults, f"_{kind}"), kind


# Detection of late waits by an engine of the harness: futures that resolve late or never, and slow calls.


class Connection:
    """Its futures are the test's."""

    def __init__(self) -> None:
        self.future: Promise[Any] = Promise()

    def request(self, name: str, payload: object, *, timeout: float) -> Future[Any]:
        return self.future

    bulk_request = begin = request


class Client:
    def __init__(self) -> None:
        self.deadlines = LOCAL.scaled(0.5)
        self._connection = Connection()

    def request(self, name: str, payload: object, *, timeout: float | None = None) -> object:
        time.sleep(0.2)
        raise DeadlineExceeded("never")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setattr(watch, "ALLOWANCE_S", 0.05)
    return Client()


def texts(told: list[Event]) -> list[str]:
    return [event.text for event in told if isinstance(event, Complaint)]


@pytest.mark.parametrize("method", ["request", "bulk_request"])
def test_a_future_that_never_comes_is_told_once(client: Client, method: str) -> None:
    told: list[Event] = []
    watching = watch.Watch(client, told.append)  # type: ignore[arg-type]
    getattr(client._connection, method)("LOOKUP", None, timeout=0.01)
    wait_until(lambda: told, what="the complaint")
    assert texts(told)[0].startswith("the future of LOOKUP is pending")
    watching.check_nothing_is_pending()
    assert texts(told) == [texts(told)[0], "futures of a closed client are pending: LOOKUP"]


def test_a_future_that_comes_late_is_told(client: Client) -> None:
    told: list[Event] = []
    watching = watch.Watch(client, told.append)  # type: ignore[arg-type]
    future = client._connection.request("LOOKUP", None, timeout=-10.0)
    future.set_result(None)
    assert any(text.startswith("the future of LOOKUP came") for text in texts(told))
    told.clear()
    watching.check_nothing_is_pending()
    assert not told


def test_a_call_that_takes_longer_than_it_may_is_told(client: Client) -> None:
    told: list[Event] = []
    watching = watch.Watch(client, told.append)  # type: ignore[arg-type]
    with pytest.raises(DeadlineExceeded):
        client.request("LOOKUP", None)
    assert isinstance(told[0], TimedOut)
    assert texts(told)[0].startswith("the call LOOKUP came")
    assert watching.failures == {DeadlineExceeded.code: 1}
    told.clear()
    with pytest.raises(DeadlineExceeded):
        client.request("LOOKUP", None, timeout=20.0)
    assert not texts(told)
    watching.check_nothing_is_pending()
    assert not texts(told)
