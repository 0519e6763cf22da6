"""Owns the choice of the bare client's way: whichever is faster here is what a tier is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvframework.bench.interleave import Case
from kvframework.bench.statistics import Rounds, percentile

# Commands under way. More of them only grow the server's own buffers.
WAYS = {"one at a time": 1, "two under way": 2}


def bare_cases(operation: str, case: Callable[[int], float]) -> dict[str, Case]:
    """Every way of an operation as a case of its own; `case` takes how many commands are under way."""
    return {_name(operation, way): _with(case, under_way) for way, under_way in WAYS.items()}


def fastest_way(operation: str, measured: Mapping[str, Rounds]) -> tuple[str, Rounds]:
    """The way with the smallest median, and its seconds."""
    ways = [(way, measured[_name(operation, way)]) for way in WAYS]
    return min(ways, key=lambda each: percentile(sorted(s for samples in each[1] for s in samples), 0.5))


def _name(operation: str, way: str) -> str:
    return f"bare {operation}, {way}"


def _with(case: Callable[[int], float], under_way: int) -> Case:
    return lambda: case(under_way)
