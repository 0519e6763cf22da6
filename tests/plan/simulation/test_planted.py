"""The simulation finds what it is for: bugs that are planted, each shortened to the few turns that matter."""

from __future__ import annotations

import pytest

from tests.plan.simulation.planted import PLANTED
from tests.plan.simulation.play import Failure, Play, draw, play, shorten

# Some bugs need what few seeds do; the first seed that finds one ends the search.
HUNT = range(40)
STEPS = 25_000


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str) -> None:
    with PLANTED[name]():
        assert any(isinstance(play(seed, draw(seed), STEPS), Failure) for seed in HUNT)


def test_what_is_found_is_shortened_to_what_matters() -> None:
    with PLANTED["an_expired_lease_is_published"]():
        found = play(0, draw(0), STEPS)
        assert isinstance(found, Failure)
        drawn = draw(0)
        short = shorten(0, [next(drawn) for _ in range(found.at)], found.what)
        again = play(0, short, len(short) + 1, check_every=1)
        assert isinstance(again, Failure)
        assert again.what == found.what
    assert len(short) <= 6
    assert {name for name, _ in short} >= {"store", "commit"}
    assert isinstance(play(0, short, len(short) + 1, check_every=1), Play), "without the bug it breaks nothing"
