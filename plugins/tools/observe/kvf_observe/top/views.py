"""The tables of `kvframework top`: their columns, and their rows out of a window. Pure.

What happened at a server within the last minute, out of its status documents. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from kvf_observe.poller import Document
from kvf_observe.readings import tiers
from kvframework.api.console import short_count, short_duration, short_number
from kvframework.api.plugin import ByteSize
from kvframework.api.process import one_line

# Text, a number, or nothing that is known.
Value = str | float | None
Row = tuple[Value, ...]

OTHER = "other"
CLOSED = "closed"


class Column(NamedTuple):
    """The head of a column, and the form of its numbers; texts have none."""

    head: str
    form: Callable[[float], str] | None = None

    def shown(self, value: Value) -> str:
        if value is None or value == "":
            return "-"
        return str(value) if self.form is None else self.form(float(value))


class View(NamedTuple):
    """A table. The first column names the row; `failing` rows are red."""

    columns: tuple[Column, ...]
    rows: Callable[[Window], Iterator[Row]]
    failing: Callable[[Row], bool] = lambda _: False


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
    Column("hit rate", percent),
    Column("saved/s", short_count),
    Column("asked/s", short_count),
    Column("lookups/s", short_count),
    Column("stored/s", short_count),
    Column("evicted/s", short_count),
    Column("objects", short_count),
    Column("hit rate, all", percent),
)


def _use(kind: str, noun: str) -> View:
    """The view of `use.KIND` of the status, with the largest part of L1 first."""

    def rows(window: Window) -> Iterator[Row]:
        now = _map(reach(window.now, "use", kind))
        before = with_the_ended(_map(reach(window.before, "use", kind)), now)
        for name, row in sorted(now.items(), key=lambda each: (-reach(each[1], "bytes"), each[0].casefold())):
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

    return View((Column(noun), *_USE), rows)


def with_the_ended(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of before as the present ones count them: what ended since then is part of `other`."""
    made = {name: row for name, row in before.items() if name in now}
    for row in (row for name, row in before.items() if name not in now):
        other = made.get(OTHER, {})
        made[OTHER] = {field: value + reach(other, field) for field, value in row.items()}
    return made


def _tiers(window: Window) -> Iterator[Row]:
    return (_tier(window, number, name, tier) for number, (name, tier) in enumerate(tiers(window.now)))


def _tier(window: Window, number: int, name: str, tier: Any) -> Row:
    def grown(counter: str) -> float:
        return window.grown("l2", number, counter)

    state = str(reach(tier, "state"))
    return (
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


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


TIERS = View(
    (
        Column("tier"),
        Column("circuit"),
        *(Column(f"{call} {part}", _milliseconds) for call in ("get", "put") for part in ("p50", "p99")),
        Column("read/s", size),
        Column("written/s", size),
        Column("hit rate", percent),
        Column("to write", short_count),
        Column("errors/s", short_count),
        Column("used", size),
        Column("capacity", size),
    ),
    _tiers,
    failing=lambda row: row[1] != CLOSED,
)
# By name; the overview is no single table.
VIEWS: dict[str, View | None] = {
    "overview": None,
    "models": _use("models", "model"),
    "tenants": _use("tenants", "tenant"),
    "namespaces": _use("namespaces", "namespace"),
    "engines": _use("engines", "engine"),
    "tiers": TIERS,
}


SPAN_S = 60.0
# Documents that are kept lie as far apart, however often the server is asked.
APART_S = 1.0

_NOTHING: Document = {}


def reach(node: Any, *path: str | int) -> Any:
    """The value at a path of keys and places; 0 where a server of another release has none."""
    for key in path:
        if isinstance(node, Mapping):
            node = node.get(str(key))
        else:
            node = node[key] if isinstance(node, list) and isinstance(key, int) and key < len(node) else None
    return 0 if node is None else node


class Window(NamedTuple):
    """The newest document, one of the same server from `seconds` before, and whether that is the server's start. Of a
    window of 0 seconds no rate is known."""

    now: Document
    before: Document
    seconds: float

    def rate(self, grown: float) -> float | None:
        """An amount of the window by the second."""
        return grown / self.seconds if self.seconds > 0 else None

    def grown(self, *path: str | int) -> float:
        """By how much a counter grew."""
        return float(max(reach(self.now, *path) - reach(self.before, *path), 0))


class Minute:
    """A ring of documents of one start of a server, a minute long."""

    def __init__(self) -> None:
        self._boot: object = None
        self._ring: deque[tuple[float, Document]] = deque()

    def add(self, document: Document, at: float) -> Window:
        """Take a document of the time `at`, which never goes back, and return what is known now.

        The documents of another start are forgotten. All counters of a server that is younger than the window began at
        0 with it."""
        boot = (reach(document, "server", "boot_id"), reach(document, "server", "pid"))
        if boot != self._boot:
            self._boot = boot
            self._ring.clear()
            uptime = reach(document, "server", "uptime_s")
            if 0 < uptime <= SPAN_S:
                self._ring.append((at - uptime, _NOTHING))
        if not self._ring or at - self._ring[-1][0] >= APART_S:
            self._ring.append((at, document))
        while len(self._ring) > 1 and self._ring[1][0] <= at - SPAN_S:
            self._ring.popleft()
        began, before = self._ring[0]
        return Window(document, before, max(at - began, 0.0))
