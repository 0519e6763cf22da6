"""Detection of late waits by an engine of the harness: futures that resolve late or never, and slow calls."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvframework.api.futures import Future, Promise
from kvframework.errors import DeadlineExceeded
from kvframework.wire.protocol import LOCAL
from tests.core.chaos import watch
from tests.core.chaos.events import Complaint, Event, TimedOut
from tests.support.waiting import wait_until


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
