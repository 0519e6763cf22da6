"""Listeners of a server: each has a thread, and none harms another one, the status or the end. Who uses the cache, and
the sketch of hot prefixes."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.api.listener import Listener, Records
from kvframework.record_ring import RecordRing
from kvframework.service import listeners as module
from kvframework.service import usage_counts
from kvframework.service.listeners import Listeners
from kvframework.service.usage_counts import HOUR_S, MAX_ROWS, MINUTE_S, OTHER, HotPrefixes, LastHour, _rows
from kvframework.storage.l1.entries import Account
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


def prefix_of(number: int) -> bytes:
    return bytes(16) + number.to_bytes(32, "little")


def counted(numbers: list[int]) -> HotPrefixes:
    sketch = HotPrefixes(lambda _namespace: "m")
    for number in numbers:
        sketch.looked_up(prefix_of(number), 256 if number % 2 else 0)
    return sketch


def test_few_prefixes_are_counted_exactly() -> None:
    rows = counted([1] * 5 + [2] * 3 + [3]).status()
    assert [(row["count"], row["error"], row["hit_tokens"]) for row in rows] == [(5, 0, 1280), (3, 0, 0), (1, 0, 256)]


def test_of_many_prefixes_the_hot_ones_are_found_within_their_error() -> None:
    chance = random.Random(3)
    numbers = [chance.choice((chance.randrange(10), chance.randrange(1_000_000))) for _ in range(30_000)]
    true = Counter(numbers)
    sketch = counted(numbers)
    assert 0 < sketch.floor <= len(numbers) / usage_counts.ENTRIES
    assert len(sketch.rows) <= usage_counts.MOST
    for number in true:
        count, error = sketch.rows.get(prefix_of(number), (sketch.floor, sketch.floor, 0))[:2]
        assert count - error <= true[number] <= count
    shown = sketch.status()
    assert len(shown) == usage_counts.SHOWN
    assert {row["count"] for row in shown[:10]} == {sketch.rows[prefix_of(number)][0] for number in range(10)}


def test_the_names_of_a_prefix_differ_between_starts() -> None:
    (one,), (two,) = counted([1]).status(), counted([1]).status()
    assert one["prefix"] != two["prefix"]


def test_rows_are_bounded_and_lose_nothing() -> None:
    accounts = []
    for number in range(MAX_ROWS + 10):
        account = Account()
        account.looked_up(10, number, 1)
        accounts.append((f"model {number}", account))
    rows = _rows(accounts)
    assert len(rows) == MAX_ROWS + 1
    assert rows[OTHER]["lookups"] == 10
    assert sum(row["hit_tokens"] for row in rows.values()) == sum(range(1, MAX_ROWS + 11))


@given(st.lists(st.floats(0.0, 2000.0), max_size=400))
def test_the_last_hour_is_right_to_a_minute(pauses: list[float]) -> None:
    now, times = 0.0, list[float]()
    hour = LastHour(lambda: now)
    for pause in pauses:
        now += pause
        hour.lookup(now, lambda: {"lookups": len(times)})
        times.append(now)
        counted_now = hour.status({"lookups": len(times)})["lookups"]
        assert sum(now - each <= HOUR_S - MINUTE_S for each in times) <= counted_now
        assert counted_now <= sum(now - each <= HOUR_S for each in times)


def test_an_hour_without_lookups_has_none() -> None:
    now = 0.0
    hour = LastHour(lambda: now)
    hour.lookup(now, lambda: {"lookups": 0})
    assert hour.status({"lookups": 1}) == {"lookups": 1}
    now = HOUR_S + 1.0
    assert hour.status({"lookups": 1}) == {"lookups": 0}
