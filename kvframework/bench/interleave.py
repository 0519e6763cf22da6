"""Owns the order in which cases are measured: all of them in every round, so that each sees the same machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

# Does its work once and returns the seconds of what is to be measured, without preparations.
Case = Callable[[], float]


def timed(call: Callable[[], object]) -> float:
    """The seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def interleave(
    cases: Mapping[str, Case], *, rounds: int, calls: int = 1, advance: Callable[[], None] = lambda: None
) -> dict[str, list[list[float]]]:
    """The samples of each case: `rounds` lists of `calls` seconds. Blocks until all is measured.

    Every other round goes backwards, so that no case always profits from the one before it.
    """
    measured: dict[str, list[list[float]]] = {name: [] for name in cases}
    for index in range(rounds):
        for name, case in list(cases.items())[:: -1 if index % 2 else 1]:
            measured[name].append([case() for _ in range(calls)])
        advance()
    return measured
