"""Which loads are short beside the engine's step."""

from __future__ import annotations

import pytest

from kvf_vllm.pace import LoadPace
from tests.vllm.stand_ins import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(clock: Clock) -> LoadPace:
    """Of an engine whose steps take 40 ms, and whose loads copy 1 GB/s."""
    made = LoadPace(clock)
    for seconds in (0.2, 0.04, 0.05):
        made.begin_step(computes=True)
        clock.now += seconds
        made.end_step()
    made.copied(10_000_000, 0.01)
    return made


def test_nothing_is_short_before_a_load_was_copied() -> None:
    pace = LoadPace()
    assert not pace.is_short(1, idle=True)


def test_a_load_is_short_beside_the_shortest_step(pace: LoadPace) -> None:
    assert pace.is_short(9_000_000, idle=False)
    assert not pace.is_short(11_000_000, idle=False)
    # No request waits for a step that would compute nothing else.
    assert pace.is_short(49_000_000, idle=True)
    assert not pace.is_short(51_000_000, idle=True)


def test_the_loads_of_one_step_are_short_together(pace: LoadPace) -> None:
    pace.plan(6_000_000)
    assert pace.has_planned
    assert not pace.is_short(6_000_000, idle=False)
    pace.begin_step(computes=True)
    assert pace.is_short(6_000_000, idle=False)


def test_a_step_that_computes_the_rest_of_the_prompt_is_longer(pace: LoadPace) -> None:
    assert pace.is_short(14_000_000, idle=False, prompt_s=0.02)
    assert not pace.is_short(16_000_000, idle=False, prompt_s=0.02)
    # vLLM computes a long prompt in several steps: none takes longer than the longest that was seen.
    assert pace.is_short(59_000_000, idle=False, prompt_s=10.0)
    assert not pace.is_short(61_000_000, idle=False, prompt_s=10.0)


def test_a_step_with_loads_says_nothing_of_how_long_steps_take(pace: LoadPace, clock: Clock) -> None:
    pace.plan(1_000_000)
    pace.begin_step(computes=True)
    clock.now += 0.001
    pace.end_step()
    assert pace.is_short(9_000_000, idle=False)


def test_of_two_steps_under_way_the_second_waits_for_the_first(pace: LoadPace, clock: Clock) -> None:
    pace.begin_step(computes=True)
    clock.now += 0.04
    pace.begin_step(computes=True)
    clock.now += 0.01
    pace.end_step()
    clock.now += 0.02
    pace.end_step()
    # The second took 20 ms behind the first.
    assert pace.is_short(4_900_000, idle=False)
    assert not pace.is_short(5_100_000, idle=False)


def test_a_copy_that_slept_or_failed_slowly_makes_loads_wait_until_it_is_forgotten(pace: LoadPace) -> None:
    pace.copied(10_000_000, 3600.0)
    assert not pace.is_short(1_000_000, idle=True)
    for _ in range(16):
        pace.copied(10_000_000, 0.01)
    assert pace.is_short(9_000_000, idle=False)
