"""Owns the statistics of benches: spreads, percentiles, rates, and ratios that are taken round by round. Pure.

A case is measured in rounds, interleaved with its reference. `Rounds` holds its seconds: one list of samples a round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import msgspec

Rounds = Sequence[Sequence[float]]


class Spread(msgspec.Struct, frozen=True):
    """Smallest, middle and largest of what was measured."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises `ValueError` without values."""
        return cls(min(values), median(values), max(values))


class Latency(msgspec.Struct, frozen=True):
    """Percentiles of single calls, in microseconds."""

    p50_us: float
    p99_us: float
    max_us: float
    samples: int

    @classmethod
    def of(cls, rounds: Rounds) -> Latency:
        """Raises `ValueError` without samples."""
        samples = sorted(second * 1e6 for samples in rounds for second in samples)
        return cls(percentile(samples, 0.5), percentile(samples, 0.99), samples[-1], len(samples))


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """The smallest value that at least `fraction` of all `ordered` (ascending) values do not exceed.

    Raises `ValueError` without values.
    """
    if not ordered:
        raise ValueError("no values")
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def rate_gb_s(nbytes: int, rounds: Rounds) -> Spread:
    """GB (10^9 bytes) a second of each sample that moved `nbytes`."""
    return Spread.of([nbytes / second / 1e9 for samples in rounds for second in samples])


def ratio(over: Rounds, under: Rounds) -> Spread:
    """The median seconds of `over` in units of those of `under`, round by round: a drift of the machine that lasts
    longer than a round cancels. Raises `ValueError` if the rounds do not pair."""
    return Spread.of([median(a) / median(b) for a, b in zip(over, under, strict=True)])
