"""The recompute plan: what is chosen, for any prompt, by any measure."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.lazy import torch

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    global Held, by_deviation
    from kvf_blend.engine.recompute import Held, by_deviation


SHARES = st.floats(0, 1) | st.sampled_from([0.0, 0.07, 0.15, 0.5, 1.0])
NUMBERS = st.floats(0, 100) | st.just(math.nan) | st.just(math.inf)


@st.composite
def prompts(draw: st.DrawFn) -> Held:
    """A prefix, then segments with gaps between them, some of none."""
    at = prefix = draw(st.integers(0, 20))
    segments = []
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), max_size=6)):
        segments.append((at + gap, at + gap + length))
        at += gap + length
    return Held(at + draw(st.integers(1, 10)), prefix, tuple(segments))


@st.composite
def measured(draw: st.DrawFn) -> tuple[Held, torch.Tensor]:
    held = draw(prompts())
    return held, torch.tensor(draw(st.lists(NUMBERS, min_size=held.loaded, max_size=held.loaded)), dtype=torch.float64)


def inside(held: Held) -> set[int]:
    return {at for start, end in held.segments for at in range(start, end)}


def check(held: Held, plan: torch.Tensor) -> list[int]:
    """What is true of every plan; the positions of loaded tokens in it."""
    positions = plan.tolist()
    assert positions == sorted(set(positions))
    assert all(held.prefix <= at < held.tokens for at in positions)
    missing = set(range(held.prefix, held.tokens)) - inside(held)
    assert missing <= set(positions)
    assert held.missing_positions().tolist() == sorted(missing)
    return sorted(set(positions) - missing)


def wanted(share: float, loaded: int) -> int:
    exact = share * loaded
    return round(exact) if abs(exact - round(exact)) < 1e-9 else math.ceil(exact)


@given(measured(), SHARES)
def test_the_share_that_deviates_most_is_chosen(prompt, share):
    held, deviation = prompt
    chosen = check(held, by_deviation(held, deviation, share))
    assert len(chosen) == wanted(share, held.loaded)
    by_position = dict(
        zip(held.loaded_positions().tolist(), deviation.nan_to_num(nan=math.inf, posinf=math.inf).tolist(), strict=True)
    )
    left = [by_position[at] for at in inside(held) - set(chosen)]
    assert not chosen or not left or min(by_position[at] for at in chosen) >= max(left)


@pytest.mark.parametrize(
    ("tokens", "prefix", "segments"),
    [
        (10, 10, ()),
        (10, -1, ()),
        (0, 0, ()),
        (10, 0, ((3, 3),)),
        (10, 4, ((3, 5),)),
        (10, 0, ((4, 6), (2, 3))),
        (10, 0, ((1, 4), (3, 6))),
        (10, 0, ((5, 10),)),
        (10, 0, ((5, 12),)),
    ],
)
def test_what_makes_no_sense_of_a_prompt_is_refused(tokens, prefix, segments):
    with pytest.raises(ValueError):
        Held(tokens, prefix, segments)


def test_shares_and_measures_that_do_not_fit_are_refused():
    held = Held(10, 0, ((2, 6),))
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError):
            by_deviation(held, torch.zeros(4), share)
    with pytest.raises(ValueError):
        by_deviation(held, torch.zeros(5), 0.5)
