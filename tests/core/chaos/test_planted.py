"""The harness finds the bugs that are planted in a server: a harness that cannot fail proves nothing."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.core.chaos.course import Broken, Course
from tests.core.chaos.server_program import BUGS
from tests.core.chaos.world import Plan

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

FOUND = {
    "wrong_byte": "WRONG BYTES in a load",
    "lost_commit": "that a STORE said are stored",
    "leaked_pin": "of rest there are still",
    "leaked_range": "the arena is not whole again",
    "leaked_descriptor": "descriptors",
    "traceback": "has a traceback",
}
ALWAYS = ("wrong_byte", "lost_commit", "leaked_range")


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=[] if bug in ALWAYS else pytest.mark.slow) for bug in FOUND])
def test_a_planted_bug_is_found(bug: str) -> None:
    plan = Plan(seed=1, seconds=5.0, engines=2, l2=False, bug=bug)
    with pytest.raises(Broken) as broken:
        Course(plan, lanes=()).run()
    assert FOUND[bug] in str(broken.value)
    assert f"--seed 1 --seconds 5 --engines 2 --no-l2 --bug {bug}" in str(broken.value)


def test_every_bug_has_its_test() -> None:
    assert FOUND.keys() == BUGS.keys()
