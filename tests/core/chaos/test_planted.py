"""The harness finds the bugs that are planted in a server: a harness that cannot fail proves nothing."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.core.chaos.course import Broken, Course
from tests.core.chaos.memory import PER_CHUNK, PagedMemory
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


def test_an_engine_sees_wrong_bytes_wherever_they_lie() -> None:
    memory, digests = PagedMemory(), [bytes([number]) * 32 for number in range(3)]
    blocks = [5, 2, 7, *range(20, 20 + 3 * PER_CHUNK - 3)]
    memory.compute(b"namespace", digests, blocks)
    assert memory.wrong_bytes(b"namespace", digests, blocks) == ""
    assert memory.wrong_bytes(b"another", digests, blocks)
    assert memory.wrong_bytes(b"namespace", digests[::-1], blocks)
    assert memory.wrong_bytes(b"namespace", digests, [2, 5, *blocks[2:]])
    assert memory.wrong_bytes(b"namespace", digests, blocks, 20), "what a load leaves out must be untouched"
    for block in (5, 30, 0):
        memory._bits[1, 0, block, 3, 1, 2] ^= 1 << 20
        assert memory.changed()
        assert "1 of" in memory.wrong_bytes(b"namespace", digests, blocks)
        memory._bits[1, 0, block, 3, 1, 2] ^= 1 << 20
    assert memory.stray_bytes(blocks) == ""
    assert memory.stray_bytes(blocks[1:])
