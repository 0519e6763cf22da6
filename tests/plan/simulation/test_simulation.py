"""Storage under a virtual clock: clients, storage threads, tiers and time take turns as a seed says, and what must be
true is checked after every step.

A failure prints its seed and a short script of turns; `play(seed, script, ...)` of `play.py` sees it again.
"""

from __future__ import annotations

import pytest

from tests.plan.simulation.play import Failure, Play, draw, play, report

SEEDS = range(6)
STEPS = 25_000
MILLION = 1_000_000


def run(seed: int, steps: int) -> Play:
    outcome = play(seed, draw(seed), steps)
    if isinstance(outcome, Failure):
        pytest.fail(report(seed, outcome), pytrace=False)
    return outcome


@pytest.mark.parametrize("seed", SEEDS)
def test_what_must_be_true_is_true_after_every_step(seed: int) -> None:
    game = run(seed, STEPS)
    assert game.steps == STEPS
    happened = game.world.counts
    for what in ("published", "late", "hits", "reads", "held"):
        assert happened[what], f"nothing was tested: no {what}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(100, 120))
def test_a_million_steps(seed: int) -> None:
    assert run(seed, MILLION // 20).steps == MILLION // 20


def test_a_seed_does_the_same_each_time() -> None:
    first, second = (play(5, draw(5), 3000) for _ in range(2))
    assert isinstance(first, Play)
    assert isinstance(second, Play)
    assert (first.turns, first.counts, first.world.counts) == (second.turns, second.counts, second.world.counts)
    assert first.world.manager.table.counters == second.world.manager.table.counters
