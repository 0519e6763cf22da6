"""The space of nonces: in a small one values collide as often as the page's formula says, and in the real one never."""

from __future__ import annotations

import math
import random

import pytest

from kvf_crypto.sealing import MOST_VALUES, RANDOM_BYTES, DataKey, Head, seal
from kvframework.api.codec import ValueName


def chance(values: float, bits: int) -> float:
    """The probability that some two of `values` drew the same `bits`."""
    return -math.expm1(-values * (values - 1) / 2 / 2**bits)


@pytest.mark.parametrize("bits", [12, 16, 20])
def test_collisions_in_a_small_space_come_as_the_formula_says(bits: int) -> None:
    """A fleet of 50 nodes that restart, in a space in which they do collide."""
    draw, each, times = random.Random(bits), int(2 ** (bits / 2)) // 50 or 1, 1500
    met = 0
    for _ in range(times):
        drawn = [draw.getrandbits(bits) for _node in range(50) for _ in range(each)]
        met += len(set(drawn)) < len(drawn)
    expected = chance(50 * each, bits)
    assert met / times == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / times) + 0.01)


def test_the_real_space_outlasts_every_fleet() -> None:
    bits = 8 * RANDOM_BYTES
    fleet = 1000 * 1e6 * 580 * 365 * 86400
    assert fleet == pytest.approx(2**64, rel=0.01)
    assert chance(2**64, bits) == pytest.approx(2.0**-65, rel=0.01)
    assert chance(float(MOST_VALUES), bits) < 2.0**-96
    # A plain nonce of 96 bits would have met its like with the bound's probability after 2^32 values.
    assert chance(2.0**32, 96) == pytest.approx(2.0**-33, rel=0.01)


def test_a_clock_that_jumps_and_a_seed_that_returns_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    key, name = DataKey.derive(bytes(32), "", 1), ValueName(bytes(72), bytes(16), "")
    drawn = []
    for now in (0.0, 1e9, -1e9, 1e9):
        monkeypatch.setattr("time.time", lambda now=now: now)
        random.seed(1)
        drawn += [
            Head.of(seal(key, name, memoryview(b"x"), cipher=1, packing=0, object_bytes=1)).random for _ in range(500)
        ]
    assert len(set(drawn)) == 2000
