"""Owns the two halves of a round: every case on a quiet machine, and every case beside a disturbance.

In the bench's process, for one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from kvframework.bench.interleave import Case, interleave
from kvframework.bench.statistics import Rounds


class Disturbance(Protocol):
    """Something that wants the machine too. Both calls return once it is so, and do nothing if it was so already."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


def measure_halves(
    disturbance: Disturbance,
    cases: Mapping[str, Case],
    *,
    rounds: int,
    calls: int = 1,
    advance: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Rounds], dict[str, Rounds]]:
    """The samples of each case on a quiet machine, and beside `disturbance`. Turning it on and off is in no case's
    time; it is off between rounds and at the end. Blocks until all is measured."""
    both: dict[str, Case] = {f"quiet {name}": partial(_after, disturbance.end, case) for name, case in cases.items()}
    both |= {f"beside {name}": partial(_after, disturbance.begin, case) for name, case in cases.items()}

    def round_is_over() -> None:
        disturbance.end()
        advance()

    measured = interleave(both, rounds=rounds, calls=calls, advance=round_is_over)
    return ({name: measured[f"quiet {name}"] for name in cases}, {name: measured[f"beside {name}"] for name in cases})


def _after(switch: Callable[[], None], case: Case) -> float:
    switch()
    return case()
