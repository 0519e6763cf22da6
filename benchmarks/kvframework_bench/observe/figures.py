"""The figures of `kvframework bench observe` and their tables."""

from __future__ import annotations

import msgspec
from rich.table import Table

from kvframework_bench.console import format_latency, format_ratio, new_table
from kvframework_bench.rounds import Latency, Spread
from kvframework_bench.server import Resident

NONE = "none"
# Another server in the same state: how far its ratios are from 1 is the noise.
AGAIN = "none, again"


class ObservedLookup(msgspec.Struct, frozen=True):
    """LOOKUPs of one kind in one state of the server. The ratios are to the state `none`, round by round: of the
    medians, and of the 99th percentiles."""

    state: str
    lookup: str
    latency: Latency
    p50_ratio: Spread
    p99_ratio: Spread


class ServerMemory(msgspec.Struct, frozen=True):
    """Memory of a server that remembers `ghosts` keys: when nothing was ever asked, and after the last round."""

    server: str
    ghosts: int
    ghost_bytes: int
    at_rest: Resident
    at_end: Resident


class ObserveFigures(msgspec.Struct, frozen=True):
    """Each round measures each state for `seconds`. `scrapes` and `follows` count those of all rounds."""

    seed: int
    rounds: int
    seconds: float
    scrapes: int
    follows: int
    lookups: list[ObservedLookup]
    memory: list[ServerMemory]


def observe_tables(figures: ObserveFigures) -> list[Table]:
    """Return one table for the lookups and one for the memory."""
    return [_lookups(figures), _memory(figures.memory)]


def _lookups(figures: ObserveFigures) -> Table:
    headers = ["p50", "p99", f"p50 ratio to {NONE}", "min to max", f"p99 ratio to {NONE}", "min to max", "target"]
    table = new_table("LOOKUP", *headers)
    for row in figures.lookups:
        ratios = [*format_ratio(row.p50_ratio), *format_ratio(row.p99_ratio)]
        target = "within the noise" if row.state not in (NONE, AGAIN) else ""
        table.add_row(f"{row.lookup}, {row.state}", *format_latency(row.latency), *ratios, target)
    return table


def _memory(rows: list[ServerMemory]) -> Table:
    table = new_table(
        "memory without the arena",
        "at rest",
        "added",
        "target",
        "private, at rest",
        "at the end",
        "remembered evictions",
    )
    least = rows[0].at_rest.excluding_shared
    for row in rows:
        rest = row.at_rest
        table.add_row(
            row.server,
            _megabytes(rest.excluding_shared),
            _megabytes(rest.excluding_shared - least) if row.ghosts else "",
            "10.0 MB" if row.ghosts else "",
            _megabytes(rest.anon),
            _megabytes(row.at_end.excluding_shared),
            _megabytes(row.ghost_bytes),
        )
    return table


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
