"""Who uses the cache, and the sketch of hot prefixes."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvframework.service import usage_counts
from kvframework.service.usage_counts import HOUR_S, MAX_ROWS, MINUTE_S, OTHER, HotPrefixes, LastHour, _rows
from kvframework.storage.l1.entries import Account


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
