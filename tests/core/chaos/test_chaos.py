"""Engines, a server, a Redis and a folder through a schedule of faults: no wrong byte, no wait without an end, nothing
left behind. `KVFRAMEWORK_CHAOS_SEED` adds a run by another seed, `KVFRAMEWORK_CHAOS_SECONDS` is how long the slow one
takes."""

from __future__ import annotations

import os
import random

import pytest

pytest.importorskip("torch")

from tests.core.chaos.course import Course
from tests.core.chaos.world import Plan

pytestmark = [pytest.mark.torch, pytest.mark.redis]

FIXED = 20
SECONDS = 45.0
SLOW_S = float(os.environ.get("KVFRAMEWORK_CHAOS_SECONDS", "3600"))
ANOTHER = os.environ.get("KVFRAMEWORK_CHAOS_SEED")


@pytest.mark.timeout(SECONDS + 600)
@pytest.mark.parametrize("seed", [FIXED, *([int(ANOTHER)] if ANOTHER else [])])
def test_chaos(seed: int) -> None:
    print(dict(Course(Plan(seed, SECONDS)).run().tally))


@pytest.mark.slow
@pytest.mark.timeout(SLOW_S + 600)
def test_chaos_for_long() -> None:
    seed = int(ANOTHER) if ANOTHER else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}: {dict(Course(Plan(seed, SLOW_S)).run().tally)}")
