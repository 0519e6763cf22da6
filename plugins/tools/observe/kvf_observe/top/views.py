"""The views of `kvframework top`: the columns of each table, its rows out of a window, and what keys do to it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kvf_observe.readings import tiers
from kvf_observe.top.minute import Window, reach
from kvframework.api.console import short_count, short_duration, short_number
from kvframework.api.plugin import ByteSize
from kvframework.api.process import one_line

# Text, a number, or nothing that is known.
Value = str | float | None
Row = tuple[Value, ...]

OTHER = "other"
CLOSED = "closed"
KEYS = "q quit   1-7, Tab views   < > sort by another column   r from the other end"
_LEFT, _RIGHT = ("left", "<", ","), ("right", ">", ".")


class Column(NamedTuple):
    """The head of a column, and the form of its numbers; texts have none."""

    head: str
    form: Callable[[float], str] | None = None

    def shown(self, value: Value) -> str:
        if value is None or value == "":
            return "-"
        return str(value) if self.form is None else self.form(float(value))


class Sorting(NamedTuple):
    """By which column, and whether from the other end: texts begin with their first, numbers with the largest."""

    column: int
    reverse: bool = False


class Table(NamedTuple):
    """A view that is one table. The first column names the row; `failing` rows are red."""

    columns: tuple[Column, ...]
    rows: Callable[[Window], Iterator[Row]]
    sorting: Sorting
    failing: Callable[[Row], bool] = lambda _: False


def ordered(table: Table, window: Window, sorting: Sorting) -> list[Row]:
    """The rows in the order of a column; what is not known comes last, and equals by their first column."""
    at = sorting.column
    down = (table.columns[at].form is not None) != sorting.reverse
    rows = sorted(table.rows(window), key=lambda row: str(row[0]).casefold())
    known = [row for row in rows if row[at] is not None]
    known.sort(key=lambda row: _key(row[at]), reverse=down)
    return known + [row for row in rows if row[at] is None]


def _key(value: Value) -> Any:
    return value.casefold() if isinstance(value, str) else value


def share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def size(value: float) -> str:
    return str(ByteSize(int(value)))


def _milliseconds(value: float) -> str:
    return f"{short_number(value)} ms"


_USE = (
    Column("L1", size),
    Column("hit", percent),
    Column("saved/s", short_count),
    Column("asked/s", short_count),
    Column("lookups/s", short_count),
    Column("stored/s", short_count),
    Column("evicted/s", short_count),
    Column("objects", short_count),
    Column("hit ever", percent),
)


def _use(kind: str, noun: str) -> Table:
    def rows(window: Window) -> Iterator[Row]:
        now = _map(reach(window.now, "use", kind))
        before = with_the_ended(_map(reach(window.before, "use", kind)), now)
        for name, row in now.items():
            was = before.get(name)
            grown = {field: max(reach(row, field) - reach(was, field), 0) for field in row}
            yield (
                one_line(name),
                reach(row, "bytes"),
                share(reach(grown, "hit_tokens"), reach(grown, "asked_tokens")) if window.seconds else None,
                window.rate(reach(grown, "hit_tokens")),
                window.rate(reach(grown, "asked_tokens")),
                window.rate(reach(grown, "lookups")),
                window.rate(reach(grown, "stored_objects")),
                window.rate(reach(grown, "evicted_objects")),
                reach(row, "objects"),
                share(reach(row, "hit_tokens"), reach(row, "asked_tokens")),
            )

    return Table((Column(noun), *_USE), rows, Sorting(1))


def with_the_ended(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of before as the present ones count them: what ended since then is part of `other`."""
    made = {name: row for name, row in before.items() if name in now}
    for row in (row for name, row in before.items() if name not in now):
        other = made.get(OTHER, {})
        made[OTHER] = {field: value + reach(other, field) for field, value in row.items()}
    return made


def _tiers(window: Window) -> Iterator[Row]:
    for number, (name, tier) in enumerate(tiers(window.now)):

        def grown(counter: str, number: int = number) -> float:
            return window.grown("l2", number, counter)

        state = str(reach(tier, "state"))
        yield (
            one_line(name),
            state if state == CLOSED else f"{one_line(state)} {short_duration(reach(tier, 'state_s'))}",
            *(_latency(tier, call, part) for call in ("get_into", "put") for part in ("p50", "p99")),
            window.rate(grown("bytes_read")),
            window.rate(grown("bytes_written")),
            share(grown("hits"), grown("hits") + grown("misses")) if window.seconds else None,
            reach(tier, "write_pending"),
            window.rate(grown("errors")),
            _usage(tier, "used_bytes"),
            _usage(tier, "capacity_bytes"),
        )


def _latency(tier: Any, call: str, part: str) -> Value:
    latency = reach(tier, "latency_ms", call)
    return float(reach(latency, part)) if reach(latency, "count") else None


def _usage(tier: Any, field: str) -> Value:
    usage = reach(tier, "usage")
    return float(reach(usage, field)) if usage else None


def _prefixes(window: Window) -> Iterator[Row]:
    def named(document: Any) -> dict[tuple[str, str], Any]:
        return {
            (str(each["prefix"]), str(each["model"])): each for each in reach(document, "use", "hot_prefixes") or ()
        }

    before = named(window.before)
    for key, entry in named(window.now).items():
        count, error, found = entry["count"], entry["error"], entry["hit_tokens"]
        # The document has only the hottest: of what was not among them the past is unknown, but at the server's start.
        was = before.get(key, {} if not window.before else None)
        # Of a prefix that had been forgotten since, only what was counted without an error is sure.
        asked = None if was is None else max(min(count - reach(was, "count"), count - error), 0)
        saved = None if was is None else max(found - reach(was, "hit_tokens"), 0)
        yield (
            one_line(key[0]),
            one_line(key[1]),
            count,
            None if asked is None else window.rate(asked),
            None if saved is None else window.rate(saved),
            found,
            share(found, count - error),
            error,
        )


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


TIERS = Table(
    (
        Column("tier"),
        Column("circuit"),
        *(Column(f"{call} {part}", _milliseconds) for call in ("get", "put") for part in ("p50", "p99")),
        Column("read/s", size),
        Column("written/s", size),
        Column("hit", percent),
        Column("to write", short_count),
        Column("errors/s", short_count),
        Column("used", size),
        Column("capacity", size),
    ),
    _tiers,
    Sorting(0),
    failing=lambda row: row[1] != CLOSED,
)
PREFIXES = Table(
    (
        Column("prefix"),
        Column("model"),
        Column("lookups", short_count),
        Column("lookups/s", short_count),
        Column("saved/s", short_count),
        Column("saved", short_count),
        Column("saved each", short_count),
        Column("error", short_count),
    ),
    _prefixes,
    Sorting(2),
)
# By name, in the order of the keys; the overview is no single table.
TABLES: dict[str, Table | None] = {
    "overview": None,
    "models": _use("models", "model"),
    "tenants": _use("tenants", "tenant"),
    "namespaces": _use("namespaces", "namespace"),
    "engines": _use("engines", "engine"),
    "tiers": TIERS,
    "prefixes": PREFIXES,
}
NAMES: Sequence[str] = tuple(TABLES)


@dataclass(frozen=True)
class State:
    """The view that is looked at, how each view is sorted if not as at first, and whether that was enough."""

    view: str = NAMES[0]
    sortings: dict[str, Sorting] = field(default_factory=dict)
    ended: bool = False

    @property
    def table(self) -> Table | None:
        return TABLES[self.view]

    @property
    def sorting(self) -> Sorting | None:
        return self.sortings.get(self.view, self.table.sorting) if self.table else None


def pressed(state: State, key: str) -> State:
    """The state after a key. Keys without a meaning change nothing."""
    table, sorting = state.table, state.sorting
    if key == "q":
        return replace(state, ended=True)
    if key.isdecimal() and 1 <= int(key) <= len(NAMES):
        return replace(state, view=NAMES[int(key) - 1])
    if key in ("tab", "backtab"):
        step = 1 if key == "tab" else -1
        return replace(state, view=NAMES[(NAMES.index(state.view) + step) % len(NAMES)])
    if table is None or sorting is None:
        return state
    if key in _LEFT or key in _RIGHT:
        step = -1 if key in _LEFT else 1
        sorting = Sorting((sorting.column + step) % len(table.columns))
    elif key == "r":
        sorting = sorting._replace(reverse=not sorting.reverse)
    return replace(state, sortings=state.sortings | {state.view: sorting})
