"""Virtual time, ways to a tier and engines' queues against models."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_plan.simulation.engines import Fleet
from kvf_plan.simulation.events import Channel, VirtualTime
from kvf_plan.simulation.settings import Engines, SlowTime

TIMES = st.integers(0, 40).map(lambda quarter: quarter / 4)


@given(st.lists(st.tuples(TIMES, st.lists(TIMES, max_size=3)), max_size=20))
def test_events_happen_in_the_order_of_time_and_then_of_their_adding(plan: list[tuple[float, list[float]]]) -> None:
    """Some add others as they happen, also for times that have passed."""
    time = VirtualTime()
    added: list[tuple[float, int]] = []
    happened: list[tuple[float, int]] = []

    def add(when: float, later: list[float]) -> None:
        number = len(added)
        added.append((max(when, time.now), number))

        def event() -> None:
            happened.append((time.now, number))
            for each in later:
                add(each, [])

        time.at(when, event)

    for when, later in plan:
        add(when, later)
    while len(time):
        before, due = time.now, time.next_at()
        time.happen()
        assert before <= due == time.now == time.clock()
    assert sorted(added) == happened
    assert time.next_at() == math.inf


@pytest.mark.parametrize("when", [math.inf, math.nan])
def test_an_event_has_a_time(when: float) -> None:
    with pytest.raises(ValueError, match="an event at"):
        VirtualTime().at(when, lambda: None)


@given(st.lists(st.tuples(TIMES, st.integers(0, 50)), max_size=20), st.integers(1, 9))
def test_a_channel_serves_one_after_the_other(sent: list[tuple[float, int]], rate: int) -> None:
    channel = Channel(rate)
    free = 0.0
    for at, nbytes in sorted(sent, key=lambda each: each[0]):
        free = max(free, at) + nbytes / rate
        assert channel.send(nbytes, at) == pytest.approx(free)
    assert channel.nbytes == sum(nbytes for _, nbytes in sent)
    assert channel.busy_s == pytest.approx(channel.nbytes / rate)


@given(st.lists(st.tuples(TIMES, TIMES, st.sampled_from([0.0, 0.2, 0.5, 2.0])), max_size=4), TIMES, st.integers(1, 40))
def test_a_slow_time_takes_as_much_longer(windows: list[tuple[float, float, float]], begin: float, nbytes: int) -> None:
    slow = [SlowTime(min(a, b), max(a, b), factor) for a, b, factor in windows if a != b]
    ends = Channel(4, slow).send(nbytes, begin)
    done, step = 0.0, 1 / 64
    at = begin
    while at < ends - step / 2 and done < nbytes + 1:  # all times are quarters
        rate = 4 * min((each.factor for each in slow if each.begin_s <= at < each.end_s), default=1.0)
        done += rate * min(step, ends - at)
        at += step
    assert done == pytest.approx(nbytes, abs=4 * 2 * step)


def test_what_no_rate_sends_never_ends() -> None:
    assert Channel(4, [SlowTime(0, math.inf, 0.0)]).send(1, 0.0) == math.inf
    assert Channel(math.inf).send(1 << 40, 3.0) == 3.0


def test_what_ends_after_its_deadline_was_sent_in_vain_until_then() -> None:
    channel = Channel(10)
    assert channel.send(100, 0.0, deadline=4.0) == 10.0
    assert (channel.free_at, channel.busy_s, channel.nbytes) == (4.0, 4.0, 0)
    assert channel.send(10, 0.0, deadline=3.0) == 5.0, "it never began"
    assert channel.free_at == 4.0


@given(st.lists(st.tuples(TIMES, TIMES), max_size=20), st.integers(1, 3))
def test_each_engine_computes_one_prompt_at_a_time(prompts: list[tuple[float, float]], count: int) -> None:
    """Each prompt goes to the engine that is free first, in the order of their coming."""
    time = VirtualTime()
    fleet = Fleet(Engines(count), time)
    ended: dict[int, float] = {}
    free = [0.0] * count
    expected = {}
    ordered = sorted(prompts, key=lambda each: each[0])
    for number, (at, seconds) in enumerate(ordered):
        engine = min(range(count), key=lambda each: max(free[each] - at, 0.0))
        free[engine] = max(free[engine], at) + seconds
        expected[number] = free[engine]
        while time.next_at() <= at:
            time.happen()
        time.now = at

        def end(number: int = number) -> None:
            ended[number] = time.now

        fleet.least_loaded().add(seconds, lambda seconds=seconds: seconds, end)  # type: ignore[misc]
    while len(time):
        time.happen()
    assert ended == pytest.approx(expected)
    assert sum(queue.busy_s for queue in fleet.queues) == pytest.approx(sum(seconds for _, seconds in prompts))
