"""The figures of `kvframework bench decode` and their tables."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec
from rich.table import Table

from kvframework.api.plugin import ByteSize
from kvframework_bench.console import format_range, new_table
from kvframework_bench.rounds import Spread, percentile


class Window(msgspec.Struct, frozen=True):
    """One answer of many tokens: the seconds from each to the next, beside requests only those while one waited. Of the
    requests the times to first token, and the `loaded` tokens of their prompts."""

    gaps_s: list[float]
    first_s: list[float]
    loaded: int


class DecodeRow(msgspec.Struct, frozen=True):
    """Decoding beside one kind of requests, over all rounds; ratios are to no request, in the same round, None for that
    itself; `p99_to_held` is to the same requests without loads, None but for loads. `first_ms` are the requests' median
    times to first token, None without requests."""

    beside: str
    rounds: int
    requests: int
    loaded_tokens: int
    p50_ms: Spread
    p99_ms: Spread
    p50: Spread | None
    p99: Spread | None
    p99_to_held: Spread | None
    first_ms: Spread | None


class DecodeFigures(msgspec.Struct, frozen=True):
    """`prompt_tokens` of each request beside, whose KV are `prompt_bytes`; `answer_tokens` of the measured answer."""

    model: str
    prompt_tokens: int
    prompt_bytes: int
    answer_tokens: int
    rows: list[DecodeRow]


def gaps_within(gaps_s: Sequence[float], first: float, waits: Sequence[tuple[float, float]]) -> list[float]:
    """Return the gaps that end while a request waits for its first token, `(from, to)` each, without the last of a
    wait: in that step the request is computed, too. The first gap begins at `first`."""
    ends = list(accumulate(gaps_s, initial=first))[1:]
    found: list[float] = []
    for asked, answered in waits:
        # The engine names the older request first: its token of that step is the last one before.
        own = bisect_right(ends, answered) - 1
        found += [gap for gap, end in zip(gaps_s[: max(own, 0)], ends, strict=False) if asked < end]
    return found


def rows_of(windows: Mapping[str, Sequence[Window]], alone: str, held: str) -> list[DecodeRow]:
    """Return a row for each case; its windows are those of the rounds, in order."""
    return [_row(name, windows, alone, held) for name in windows]


def _row(name: str, cases: Mapping[str, Sequence[Window]], alone: str, held: str) -> DecodeRow:
    windows = cases[name]

    def gaps(fraction: float) -> Spread:
        return Spread.of([_gap(window, fraction) for window in windows])

    def to(other: str, fraction: float) -> Spread | None:
        if name in (alone, other):
            return None
        pairs = zip(windows, cases[other], strict=True)
        return Spread.of([_gap(mine, fraction) / max(_gap(theirs, fraction), 1e-9) for mine, theirs in pairs])

    firsts = [1000 * percentile(sorted(window.first_s), 0.5) for window in windows if window.first_s]
    return DecodeRow(
        name,
        len(windows),
        sum(len(window.first_s) for window in windows),
        sum(window.loaded for window in windows),
        gaps(0.5),
        gaps(0.99),
        to(alone, 0.5),
        to(alone, 0.99),
        to(held, 0.99),
        Spread.of(firsts) if firsts else None,
    )


def _gap(window: Window, fraction: float) -> float:
    return 1000 * percentile(sorted(window.gaps_s), fraction)


def decode_tables(figures: DecodeFigures) -> list[Table]:
    size = ByteSize(figures.prompt_bytes)
    table = new_table(
        f"time between tokens, beside {figures.prompt_tokens:,} tokens ({size})",
        *("p50", "ratio to alone", "p99", "ratio to alone", "min to max", "ratio to KV in the engine", "min to max"),
        *("requests", "tokens loaded", "first token of the requests"),
    )
    for row in figures.rows:
        table.add_row(
            row.beside,
            f"{row.p50_ms.median:.1f} ms",
            _ratio(row.p50),
            f"{row.p99_ms.median:.1f} ms",
            _ratio(row.p99),
            format_range(row.p99) if row.p99 else "",
            _ratio(row.p99_to_held),
            format_range(row.p99_to_held) if row.p99_to_held else "",
            f"{row.requests}" if row.first_ms else "",
            f"{row.loaded_tokens:,}" if row.first_ms else "",
            f"{row.first_ms.median:.0f} ms" if row.first_ms else "",
        )
    about = new_table("model", "load")
    about.add_row(figures.model, f"answers of {figures.answer_tokens} tokens")
    return [table, about]


def _ratio(ratio: Spread | None) -> str:
    return f"{ratio.median:.2f} x" if ratio else ""
