"""The figures of `kvframework bench serving` and their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from rich.table import Table

from kvframework.api.plugin import ByteSize
from kvframework_bench.console import format_range, new_table, skipped_table
from kvframework_bench.errors import Skipped
from kvframework_bench.rounds import Spread, percentile


class LoadFigures(msgspec.Struct, frozen=True):
    """The load that every row was measured with. `shared` is the share of the prompts' tokens that an unlimited cache
    could have; `cores` are those that engines, servers and the load share."""

    trace: str
    requests: int
    conversations: int
    seconds: float
    prompt_tokens: int
    answer_tokens: int
    shared: float
    model: str
    kv_cache_bytes: int
    capacity_bytes: int
    restarted: bool = False
    cores: int = 0


class Unequal(msgspec.Struct, frozen=True):
    """An answer with other tokens than without offload: its round, conversation and turn, and its first other token,
    all counted from 0."""

    round: int
    conversation: int
    turn: int
    token: int

    def __str__(self) -> str:
        return f"round {self.round}, conversation {self.conversation}, turn {self.turn}, from token {self.token}"


class Replay(msgspec.Struct, frozen=True):
    """One replay of the load. `first_ms` has a time to first token for each request, `later_ms` for each later turn of
    a conversation; `hit` is the share of the prompts' tokens that no engine computed; processor times are a request's,
    in ms, that of the engine with `connector_ms` in it, which is None where there is no connector; `scheduler_ms` is
    the part of `connector_ms` in the scheduler of an engine, and `scheduler_clock_ms` the time on the clock of the
    same calls; `equal` is the share of answers whose tokens are all those without offload, in the same round;
    `unequal` are the others."""

    first_ms: list[float]
    tokens_s: float
    hit: float
    engine_ms: float
    connector_ms: float | None
    server_ms: float
    equal: float
    later_ms: list[float] = []
    scheduler_ms: float | None = None
    scheduler_clock_ms: float | None = None
    unequal: list[Unequal] = []


class ServingRow(msgspec.Struct, frozen=True):
    """One contender with so many engines, over all rounds. Times to first token are percentiles of each round; ratios
    are to no offload in the same round, None for no offload itself. `later_ms` is the mean time to the first token of
    later turns; `later` and `later_p50` are the ratios of mean and median to the engine whose own cache is endless."""

    contender: str
    engines: int
    rounds: int
    p50_ms: Spread
    p90_ms: Spread
    p99_ms: Spread
    tokens_s: Spread
    hit: Spread
    engine_ms: Spread
    server_ms: Spread
    equal: float
    p50: Spread | None
    p90: Spread | None
    p99: Spread | None
    tokens: Spread | None
    engine: Spread | None
    connector_ms: Spread | None = None
    later_ms: Spread | None = None
    later: Spread | None = None
    later_p50: Spread | None = None
    scheduler_ms: Spread | None = None
    scheduler_clock_ms: Spread | None = None
    unequal: list[Unequal] = []


class ServingFigures(msgspec.Struct, frozen=True):
    load: LoadFigures
    rows: list[ServingRow]
    skipped: list[Skipped]


def rows_of(replays: Mapping[tuple[int, str], Sequence[Replay]], reference: str, ideal: str) -> list[ServingRow]:
    """Return a row for each case: engines and contender. Its replays are those of the rounds, in order; the contender
    `reference` has to be among them for as many engines, `ideal` may be."""
    return [
        _row(
            engines,
            contender,
            of_case,
            () if contender == reference else replays[engines, reference],
            () if contender == ideal else replays.get((engines, ideal), ()),
        )
        for (engines, contender), of_case in replays.items()
    ]


def _row(
    engines: int, contender: str, replays: Sequence[Replay], reference: Sequence[Replay], ideal: Sequence[Replay]
) -> ServingRow:
    def both(value: Callable[[Replay], float], others: Sequence[Replay] = reference) -> tuple[Spread, Spread | None]:
        mine = [value(replay) for replay in replays]
        ratios = [a / max(value(other), 1e-9) for a, other in zip(mine, others, strict=True)] if others else []
        return Spread.of(mine), Spread.of(ratios) if ratios else None

    (p50_ms, p50), (p90_ms, p90), (p99_ms, p99) = (both(_percentile(share)) for share in (0.5, 0.9, 0.99))
    tokens_s, tokens = both(lambda replay: replay.tokens_s)
    engine_ms, engine = both(lambda replay: replay.engine_ms)
    later_ms, later = both(lambda replay: sum(replay.later_ms) / max(len(replay.later_ms), 1), ideal)
    return ServingRow(
        contender,
        engines,
        len(replays),
        p50_ms,
        p90_ms,
        p99_ms,
        tokens_s,
        both(lambda replay: replay.hit)[0],
        engine_ms,
        both(lambda replay: replay.server_ms)[0],
        sum(replay.equal for replay in replays) / len(replays),
        p50,
        p90,
        p99,
        tokens,
        engine,
        _spread(replay.connector_ms for replay in replays),
        later_ms,
        later,
        both(lambda replay: percentile(sorted(replay.later_ms), 0.5), ideal)[1],
        _spread(replay.scheduler_ms for replay in replays),
        _spread(replay.scheduler_clock_ms for replay in replays),
        [each for replay in replays for each in replay.unequal],
    )


def _spread(values: Iterable[float | None]) -> Spread | None:
    noted = [value for value in values if value is not None]
    return Spread.of(noted) if noted else None


def _percentile(fraction: float) -> Callable[[Replay], float]:
    return lambda replay: percentile(sorted(replay.first_ms), fraction)


def serving_tables(figures: ServingFigures) -> list[Table]:
    """Return the load, what a user sees, what it costs, and what did not run."""
    load = figures.load
    about = new_table("load", "value")
    for name, text in (
        ("trace", load.trace),
        ("requests, conversations", f"{load.requests}, {load.conversations}"),
        ("duration of the arrivals", f"{load.seconds:.0f} s"),
        ("tokens of prompts, tokens of answers", f"{load.prompt_tokens:,}, {load.answer_tokens:,}"),
        ("prompt tokens of earlier turns", f"{load.shared:.0%}"),
        ("model", load.model),
        ("KV cache of an engine, capacity of the offload", f"{ByteSize(load.kv_cache_bytes)}, {_size(load)}"),
        ("engines restarted in the middle", "yes, except ideal" if load.restarted else "no"),
    ):
        about.add_row(name, text)
    seen = new_table(
        "time to first token",
        *("p50", "ratio to no offload", "min to max"),
        *("p90", "ratio to no offload", "min to max"),
        *("p99", "ratio to no offload", "min to max"),
    )
    turns = new_table("later turns, time to first token", "mean", "ratio to ideal", "min to max", "p50, ratio to ideal")
    cost = new_table(
        "costs",
        *("hit rate", "tokens/s", "ratio to no offload", "cores busy", "engine CPU per request", "ratio to no offload"),
        *("connector CPU", "CPU in the scheduler's thread", "elapsed in that thread", "server CPU", "equal answers"),
    )
    wrong = new_table("answers with other tokens than without offload", "answers", "first of these answers")
    for row in figures.rows:
        name = f"{row.contender}, {row.engines} engine{'s' if row.engines > 1 else ''}"
        waits = ((row.p50_ms, row.p50), (row.p90_ms, row.p90), (row.p99_ms, row.p99))
        seen.add_row(name, *(cell for wait in waits for cell in _wait(*wait)))
        if row.later_ms:
            turns.add_row(name, *_wait(row.later_ms, row.later), _ratio(row.later_p50))
        cost.add_row(
            name,
            f"{row.hit.median:.1%}",
            f"{row.tokens_s.median:.1f}",
            _ratio(row.tokens),
            f"{row.engine_ms.median * load.requests / load.seconds / 1000:.1f} of {load.cores}",
            f"{row.engine_ms.median:.0f} ms",
            _ratio(row.engine),
            *(
                f"{each.median:.1f} ms" if each else ""
                for each in (row.connector_ms, row.scheduler_ms, row.scheduler_clock_ms)
            ),
            f"{row.server_ms.median:.1f} ms",
            f"{row.equal:.0%}",
        )
        if row.unequal:
            wrong.add_row(name, f"{len(row.unequal)}", str(row.unequal[0]))
    more = [wrong] * any(row.unequal for row in figures.rows) + [skipped_table(figures.skipped)] * bool(figures.skipped)
    return [about, seen, turns, cost, *more]


def _size(load: LoadFigures) -> str:
    return str(ByteSize(load.capacity_bytes))


def _wait(ms: Spread, ratio: Spread | None) -> tuple[str, str, str]:
    return f"{ms.median:,.0f} ms", _ratio(ratio), format_range(ratio) if ratio else ""


def _ratio(ratio: Spread | None) -> str:
    return f"{ratio.median:.2f} x" if ratio else ""
