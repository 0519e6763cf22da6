"""Cases measured in interleaved rounds, and the statistics of their samples: spreads, percentiles, rates, ratios.

Every round measures every case once, so that each sees the same machine. `Rounds` holds the seconds of one
case: one list of samples a round. A ratio is taken round by round, so that a drift of the machine cancels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Protocol

import msgspec

# One measurement: runs once and returns its seconds, without preparations.
Case = Callable[[], float]


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def interleave(
    cases: Mapping[str, Case], *, rounds: int, calls: int = 1, advance: Callable[[], None] = lambda: None
) -> dict[str, list[list[float]]]:
    """Return the samples of each case: `rounds` lists of `calls` seconds. Blocks until every case is measured.

    Every other round goes backwards, so that no case always profits from the one before it.
    """
    measured: dict[str, list[list[float]]] = {name: [] for name in cases}
    for index in range(rounds):
        for name, case in list(cases.items())[:: -1 if index % 2 else 1]:
            measured[name].append([case() for _ in range(calls)])
        advance()
    return measured


Rounds = Sequence[Sequence[float]]


class Spread(msgspec.Struct, frozen=True):
    """Smallest, middle and largest of the measured values."""

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
    """Return the smallest value that at least `fraction` of all `ordered` (ascending) values do not exceed.

    Raises `ValueError` without values.
    """
    if not ordered:
        raise ValueError("no values")
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def rate_gb_s(nbytes: int, rounds: Rounds) -> Spread:
    """Return GB (10^9 bytes) a second of each sample that moved `nbytes`."""
    return Spread.of([nbytes / second / 1e9 for samples in rounds for second in samples])


def ratio(over: Rounds, under: Rounds) -> Spread:
    """Return the median seconds of `over` in units of those of `under`, round by round: a drift of the machine that
    lasts longer than a round cancels. Raises `ValueError` if the rounds do not pair."""
    return Spread.of([median(a) / median(b) for a, b in zip(over, under, strict=True)])


class Disturbance(Protocol):
    """A load that competes for the machine. Both calls return once the state is reached, and do nothing if it was
    already."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


def measure_quiet_and_disturbed(
    disturbance: Disturbance,
    cases: Mapping[str, Case],
    *,
    rounds: int,
    calls: int = 1,
    advance: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Rounds], dict[str, Rounds]]:
    """Return the samples of each case on a quiet machine, and next to `disturbance`. Turning it on and off is in no
    case's time; it is off between rounds and at the end. Blocks until every case is measured."""
    both: dict[str, Case] = {f"quiet {name}": partial(_after, disturbance.end, case) for name, case in cases.items()}
    both |= {f"disturbed {name}": partial(_after, disturbance.begin, case) for name, case in cases.items()}

    def round_is_over() -> None:
        disturbance.end()
        advance()

    measured = interleave(both, rounds=rounds, calls=calls, advance=round_is_over)
    return (
        {name: measured[f"quiet {name}"] for name in cases},
        {name: measured[f"disturbed {name}"] for name in cases},
    )


def _after(switch: Callable[[], None], case: Case) -> float:
    switch()
    return case()
