"""A tier's speed is what all loads bring together, however many run at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.pricing import PROBE_S, TierSpeed

BYTES = 1 << 24


def byte_s(speed: TierSpeed) -> float:
    prices = speed.prices()
    assert prices is not None
    return prices[0]


@given(st.floats(1e6, 1e11), st.integers(1, 8), st.integers(4, 30))
def test_loads_at_once_share_a_tier(bytes_per_s: float, at_once: int, rounds: int) -> None:
    speed, now = TierSpeed(0.0), 0.0
    for _ in range(rounds):
        loads = [speed.begin(BYTES, now) for _ in range(at_once)]
        now += at_once * BYTES / bytes_per_s
        for load in loads:
            speed.end(load, now, loaded=BYTES)
        now += 3.0  # the tier stands idle
    if rounds * at_once >= 3:
        assert byte_s(speed) == pytest.approx(1 / bytes_per_s)


@given(st.lists(st.tuples(st.integers(1000, BYTES), st.floats(0, 5)), min_size=3, max_size=20))
def test_loads_that_overlap_charge_the_busy_time(arrivals: list[tuple[int, float]]) -> None:
    """A tier of 1e7 bytes a second that serves all at once, by events."""
    rate, speed, now = 1e7, TierSpeed(0.0), 0.0
    running: dict[int, float] = {}
    loads = {}
    waiting = list(enumerate(arrivals))
    due = 0.0
    while waiting or running:
        ends = min(running.values()) * len(running) / rate if running else float("inf")
        begins = due - now if waiting else float("inf")
        step = min(ends, max(begins, 0.0))
        for number in running:
            running[number] -= step * rate / len(running)
        now += step
        if ends <= begins:
            number = min(running, key=lambda each: running[each])
            del running[number]
            speed.end(loads[number], now, loaded=arrivals[number][0])
        else:
            number, (nbytes, pause) = waiting.pop(0)
            running[number], loads[number] = nbytes, speed.begin(nbytes, now)
            due = now + pause
    assert byte_s(speed) == pytest.approx(1 / rate, rel=1e-3)


def test_what_brought_only_a_part_teaches_nothing() -> None:
    speed = TierSpeed(0.0)
    for number in range(10):
        speed.end(speed.begin(BYTES, number), number + 0.5, loaded=BYTES // 2)
    assert speed.prices() is None
    assert speed.turns(11.0).work_s(1e9, 1) == 0.0


def test_a_load_waits_for_others_until_their_bytes_are_gone() -> None:
    speed = TierSpeed(0.0)
    load = speed.chosen(BYTES, 0.0)
    assert speed.turns(0.0).load_s(1.0) == 1.0  # its speed is not known
    for number in range(3):
        speed.end(speed.begin(BYTES, number), number + 0.5, loaded=BYTES)
    assert speed.queued_bytes == BYTES
    with_it = speed.turns(3.0).load_s(0.1)
    speed.gone(load, BYTES)
    assert speed.queued_bytes == 0
    assert speed.turns(3.0).load_s(0.1) == pytest.approx(with_it / 2)


def test_a_probe_is_due_once_in_a_while_without_loads() -> None:
    speed = TierSpeed(0.0)
    for number in range(3):
        speed.end(speed.begin(BYTES, number), number + 0.5, loaded=BYTES)
    assert not speed.probes(3.0)
    assert speed.probes(3.0 + PROBE_S)
    assert not speed.probes(4.0 + PROBE_S)
    assert speed.probes(3.0 + 2 * PROBE_S)
