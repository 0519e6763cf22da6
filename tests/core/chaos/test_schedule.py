"""The schedule of faults: it follows from the seed, keeps its lanes apart and leaves nothing out."""

from __future__ import annotations

import itertools
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from tests.core.chaos.faults import Faults
from tests.core.chaos.schedule import LANES, Fault, draw
from tests.core.chaos.strangers import STRANGERS

KINDS = {kind.name for lane in LANES for kind in lane.kinds}
ENDS_SERVER = {kind.name for lane in LANES for kind in lane.kinds if kind.ends_server}

seeds = st.integers(0, (1 << 32) - 1)
lengths = st.floats(0.0, 400.0)


def by_lane(faults: list[Fault]) -> dict[str, list[Fault]]:
    found = defaultdict(list)
    for fault in faults:
        found[fault.lane].append(fault)
    return found


@given(seeds, lengths)
def test_a_seed_gives_one_schedule(seed: int, seconds: float) -> None:
    faults = draw(seed, seconds)
    assert faults == draw(seed, seconds)
    assert faults == sorted(faults, key=lambda fault: (fault.at, fault.lane))


def test_another_seed_gives_another_one() -> None:
    assert len({str(draw(seed, 60.0)) for seed in range(50)}) == 50


@given(seeds, lengths)
def test_faults_of_a_lane_follow_each_other_and_end_in_time(seed: int, seconds: float) -> None:
    for faults in by_lane(draw(seed, seconds)).values():
        for fault, following in itertools.pairwise(faults):
            assert fault.at + fault.seconds < following.at
        assert faults[-1].at + faults[-1].seconds < seconds


@given(seeds, lengths)
def test_no_server_is_killed_in_the_second_half(seed: int, seconds: float) -> None:
    assert all(fault.at < seconds / 2 for fault in draw(seed, seconds) if fault.kind in ENDS_SERVER)


@given(seeds)
def test_each_kind_comes_within_some_minutes(seed: int) -> None:
    assert {fault.kind for fault in draw(seed, 400.0)} == KINDS


def test_every_kind_can_be_done() -> None:
    for kind in KINDS:
        assert kind in STRANGERS or kind.startswith("wire_") or hasattr(Faults, f"_{kind}"), kind
