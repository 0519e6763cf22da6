"""The figures of the two servers next to each other, their tables, and panels for `kvframework_bench.plot`. Pure."""

from __future__ import annotations

import msgspec
from rich import box
from rich.table import Table

from kvframework.api.plugin import ByteSize
from kvframework_bench.console import format_range, format_rate, format_ratio, new_table
from kvframework_bench.machine import Load, Machine
from kvframework_bench.panels import Bar, Bars, Panel, spread_bar
from kvframework_bench.rounds import Latency, Spread
from kvframework_bench.tables import machine_line

OURS, PEER, ECHO = "kvframework", "LMCache", "bare echo"


class TransferRow(msgspec.Struct, frozen=True):
    """`store` and `retrieve` of one contender are shares of the speed of `copy`; rates are GB (10^9 bytes) a second.
    `verified`: every byte was compared after the first and after the last retrieve."""

    shape: str
    nbytes: int
    path: str
    contender: str
    way: str
    rounds: int
    copy_gb_s: Spread
    store_gb_s: Spread
    retrieve_gb_s: Spread
    store: Spread
    retrieve: Spread
    verified: bool


class LookupRow(msgspec.Struct, frozen=True):
    """LOOKUP of a prompt that is all in L1. `ratio_to_echo`: p50 in units of that of the bare echo, round by round."""

    tokens: int
    what: str
    latency: Latency
    ratio_to_echo: Spread


class Comparison(msgspec.Struct, frozen=True):
    """One run. `versions` are LMCache's and the command's; everything else stands in `machine`."""

    command: str
    versions: dict[str, str]
    quick: bool
    machine: Machine
    load: Load
    transfers: list[TransferRow]
    lookups: list[LookupRow]

    def as_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self)).decode()


def about(document: Comparison) -> str:
    """Return the machine and all versions, in one line."""
    peers = ", ".join(f"{name} {version}" for name, version in document.versions.items())
    return f"{machine_line(document.machine)}, {peers}"


def comparison_tables(document: Comparison, *, markdown: bool) -> list[Table]:
    """Return store and retrieve as shares of `copy`, LOOKUP in milliseconds."""
    transfers = new_table(
        "shape, path, contender",
        "copy GB/s",
        "store GB/s",
        "ratio to `copy`",
        "min to max",
        "retrieve GB/s",
        "ratio to `copy`",
        "min to max",
    )
    for row in document.transfers:
        store, retrieve = format_rate(row.store_gb_s)[0], format_rate(row.retrieve_gb_s)[0]
        transfers.add_row(
            f"{row.shape} ({ByteSize(row.nbytes)}), {row.path}, {row.contender}",
            format_rate(row.copy_gb_s)[0],
            store,
            *format_ratio(row.store),
            retrieve,
            *format_ratio(row.retrieve),
        )
    lookups = new_table("LOOKUP, all in L1", "p50 ms", "p99 ms", "p50 ratio to echo", "min to max")
    for looked in document.lookups:
        p50, p99 = (f"{us / 1000:.2f}" for us in (looked.latency.p50_us, looked.latency.p99_us))
        name = f"{looked.tokens // 1024}k tokens, {looked.what}"
        lookups.add_row(name, p50, p99, f"{looked.ratio_to_echo.median:.1f} x", format_range(looked.ratio_to_echo))
    for table in (transfers, lookups):
        table.box = box.MARKDOWN if markdown else box.SIMPLE_HEAD
    return [transfers, lookups]


def comparison_panels(document: Comparison) -> list[Panel]:
    """Return shares of `copy` over the arena and over the wire, and lookups."""
    made: list[Panel] = []
    for path in dict.fromkeys(row.path for row in document.transfers):
        rows = [row for row in document.transfers if row.path == path]
        bars = [
            spread_bar(f"{row.shape}, {word}, {row.contender}", getattr(row, word), kind=row.contender)
            for shape in dict.fromkeys(row.shape for row in rows)
            for word in ("store", "retrieve")
            for row in rows
            if row.shape == shape
        ]
        made.append(Bars(f"ratio to plain copy, {path}", "x", bars))
    looked = [
        Bar(
            f"{row.tokens // 1024}k, {row.what}",
            row.latency.p50_us / 1000,
            row.latency.p50_us / 1000,
            row.latency.p99_us / 1000,
            kind=row.what.partition(",")[0] if row.what != ECHO else "reference",
        )
        for row in document.lookups
    ]
    made.append(Bars("LOOKUP in L1, p50, up to p99", "ms", looked, log=True))
    return made
