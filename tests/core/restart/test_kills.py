"""Kills of a server at random moments while four engines store and load: no wrong byte, no wait without an end, nothing
left behind, and hits. `KVFRAMEWORK_CHAOS_SEED` chooses the moments, `KVFRAMEWORK_CHAOS_KILLS` how many the slow run
has."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")

from tests.core.chaos.course import Broken
from tests.core.restart.kills import SEED, Kills

pytestmark = [pytest.mark.torch]

KILLS = 50
SLOW = int(os.environ.get("KVFRAMEWORK_CHAOS_KILLS", "1000"))


def run(kills: int) -> None:
    tally = Kills(SEED, kills).run().tally
    print(f"seed {SEED}, {kills} kills: {dict(tally)}")
    assert tally["keepsakes"], f"seed {SEED}: {dict(tally)}"


@pytest.mark.timeout(KILLS * 30)
def test_kills() -> None:
    run(KILLS)


@pytest.mark.slow
@pytest.mark.timeout(SLOW * 30)
def test_kills_for_long() -> None:
    run(SLOW)


@pytest.mark.slow
@pytest.mark.timeout(KILLS * 30)
def test_a_server_that_forgets_who_may_still_write_is_found() -> None:
    """Proof that a broken quarantine shows in this workload, as wrong bytes."""
    with pytest.raises(Broken, match="WRONG BYTES"):
        Kills(SEED, KILLS, bug="ignored_writers").run()


@pytest.mark.slow
@pytest.mark.timeout(KILLS * 30)
def test_a_start_that_forgets_what_was_used_last_is_found() -> None:
    # Stored again before it was missed, it is in the journal twice.
    with pytest.raises(Broken, match=r"LOST|two objects have the same name"):
        Kills(SEED, KILLS, bug="forgetful_start").run()
