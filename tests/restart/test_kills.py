"""Kills of a server at random moments while four engines store and load: no wrong byte, no wait without an end, nothing
left behind, and hits. `KVFRAMEWORK_CHAOS_SEED` chooses the moments, `KVFRAMEWORK_CHAOS_KILLS` how many the slow run
has."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")

from tests.restart.kills import SEED, Kills

pytestmark = [pytest.mark.torch]

KILLS = 50
SLOW = int(os.environ.get("KVFRAMEWORK_CHAOS_KILLS", "1000"))


def run(kills: int) -> None:
    tally = Kills(SEED, kills).run().tally
    print(f"seed {SEED}, {kills} kills: {dict(tally)}")
    assert tally["keepsakes"] > tally["keepsakes_missed"], f"seed {SEED}: {dict(tally)}"


@pytest.mark.timeout(KILLS * 30)
def test_kills() -> None:
    run(KILLS)


@pytest.mark.slow
@pytest.mark.timeout(SLOW * 30)
def test_kills_for_long() -> None:
    run(SLOW)
