"""The figures of `kvframework bench disaggregated` and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from rich.table import Table

from kvframework_bench.console import new_table
from kvframework_bench.rounds import Spread

COMPUTED, CACHED, NIXL = "computed", "through the cache", "by NIXL"
WAYS = (COMPUTED, CACHED, NIXL)


class Taken(msgspec.Struct, frozen=True):
    """One request: seconds to its first token from its beginning, and from the moment that the decoder was asked; and
    the tokens of its prompt that the decoder did not compute."""

    first_s: float
    decoder_s: float
    hit: int


class DisaggregatedRow(msgspec.Struct, frozen=True):
    """One way, length and number of requests at once, over all rounds, in ms: the whole time to the first token, and
    the part of it at the decoder. `hit` is the share of the prompt that the decoder did not compute."""

    way: str
    prompt_tokens: int
    at_once: int
    rounds: int
    first_ms: Spread
    decoder_ms: Spread
    hit: float


class DisaggregatedFigures(msgspec.Struct, frozen=True):
    """`crossings` have for each number of requests at once, and each way, the shortest prompt from which on the decoder
    answers sooner than if it computed; None where it never does."""

    model: str
    kv_bytes_per_token: int
    rows: list[DisaggregatedRow]
    crossings: dict[str, int | None]


def row_of(way: str, tokens: int, at_once: int, rounds: Sequence[Sequence[Taken]]) -> DisaggregatedRow:
    """`rounds` has the requests of each round; a round counts by its median."""

    def spread(seconds: Sequence[Sequence[float]]) -> Spread:
        return Spread.of([sorted(each)[len(each) // 2] * 1e3 for each in seconds])

    found = [taken.hit / tokens for each in rounds for taken in each]
    return DisaggregatedRow(
        way,
        tokens,
        at_once,
        len(rounds),
        spread([[taken.first_s for taken in each] for each in rounds]),
        spread([[taken.decoder_s for taken in each] for each in rounds]),
        sum(found) / len(found),
    )


def crossings_of(rows: Sequence[DisaggregatedRow]) -> dict[str, int | None]:
    """The shortest prompt from which on, at all greater lengths too, the decoder's part is shorter than computing."""
    crossings: dict[str, int | None] = {}
    own = {(row.prompt_tokens, row.at_once): row.first_ms.median for row in rows if row.way == COMPUTED}
    for at_once in sorted({row.at_once for row in rows}):
        for way in (CACHED, NIXL):
            mine = {row.prompt_tokens: row for row in rows if (row.way, row.at_once) == (way, at_once)}
            shortest = None
            for tokens in sorted(mine, reverse=True):
                if mine[tokens].decoder_ms.median >= own[tokens, at_once]:
                    break
                shortest = tokens
            crossings[f"{at_once} at once, {way}"] = shortest
    return crossings


def disaggregated_tables(figures: DisaggregatedFigures) -> list[Table]:
    table = new_table(
        f"First token, ms: {figures.model}, {figures.kv_bytes_per_token} bytes a token, engines on one core each",
        *("requests at once", "decoder computes", "decoder's part through the cache", "by NIXL"),
        *("with the prefill through the cache", "by NIXL", "hit of the cache"),
    )
    cells: Mapping[tuple[int, int, str], DisaggregatedRow] = {
        (row.prompt_tokens, row.at_once, row.way): row for row in figures.rows
    }
    for tokens, at_once in sorted({key[:2] for key in cells}, key=lambda each: each[::-1]):
        own, cached, nixl = (cells[tokens, at_once, way] for way in WAYS)
        shown = (own.first_ms, cached.decoder_ms, nixl.decoder_ms, cached.first_ms, nixl.first_ms)
        # A store that came late is no hit: that column would else show computing.
        table.add_row(f"{tokens:,} tokens", str(at_once), *map(_shown, shown), f"{cached.hit:.0%}")
    crossing = new_table("The decoder answers sooner than by computing", "requests, way", "from a prompt of, tokens")
    for name, shortest in figures.crossings.items():
        crossing.add_row(name, "never" if shortest is None else str(shortest))
    return [table, crossing]


def _shown(ms: Spread) -> str:
    return f"{ms.median:.0f} ({ms.min:.0f} to {ms.max:.0f})"
