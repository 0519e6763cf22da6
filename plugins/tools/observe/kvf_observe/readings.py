"""How a metric's values are read from a status document: by paths, for each tier, for each name; and those that it does
not hold as they are: what is left, what is closed. Pure.

What a server of another release does not have reads as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from kvf_observe.http.exposition import Document, Labels, Reader, Value
from kvframework import errors
from kvframework.status import own_counters

_EMPTY = {"first": 1.0, "counts": (0,), "sum": 0.0}
# The codes with which a server of this release may answer.
CODES = tuple(
    sorted(
        error.code
        for error in vars(errors).values()
        if isinstance(error, type)
        and issubclass(error, errors.KVFrameworkError)
        and error.code.startswith(("protocol.", "request.", "run.", "storage."))
    )
)


def found(node: Any, path: str) -> Any:
    """The value at a path of keys; None where it ends early."""
    for key in path.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def number(path: str) -> Reader:
    """One number."""
    return lambda document: iter([((), found(document, path) or 0)])


def each(paths: Mapping[str, str]) -> Reader:
    """A number for each value of the label."""
    return lambda document: iter([((label,), found(document, path) or 0) for label, path in paths.items()])


def counts(path: str, always: Iterable[str] = ()) -> Reader:
    """The numbers, or histograms, of a map by its keys, and 0 for `always`."""

    def read(document: Document) -> Iterator[tuple[Labels, Value]]:
        yield from (((label,), value) for label, value in (dict.fromkeys(always, 0) | _map(document, path)).items())

    return read


def first_word(path: str, words: Sequence[str]) -> Reader:
    """1 for the word that a text begins with, 0 for the others."""

    def read(document: Document) -> Iterator[tuple[Labels, Value]]:
        text = str(found(document, path) or "")
        yield from (((word,), int(text.partition(":")[0] == word)) for word in words)

    return read


def rows(path: str, field: str) -> Reader:
    """A field of each row of a map by the row's name, and 0 for the rows that have no name of their own."""

    def read(document: Document) -> Iterator[tuple[Labels, Value]]:
        for name, row in ({"other": {}} | _map(document, path)).items():
            yield (name,), row.get(field, 0)

    return read


def histogram(path: str) -> Reader:
    """One histogram."""
    return lambda document: iter([((), found(document, path) or _EMPTY)])


def tier_names(document: Document) -> list[str]:
    """The tiers' labels, in the order of the TOML: their names, with a number where two have the same."""
    names = [str(tier["name"]) for tier in document.get("l2", ())]
    return [name if names.count(name) == 1 else f"{name}.{number}" for number, name in enumerate(names)]


def tiers(document: Document) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each tier with its label."""
    return zip(tier_names(document), document.get("l2", ()), strict=True)


def of_tiers(read: Callable[[Any], Iterable[tuple[Labels, Value]]]) -> Reader:
    """What `read` finds in the status of each tier, whose label is the first."""
    return lambda document: (
        ((name, *labels), value) for name, status in tiers(document) for labels, value in read(status)
    )


def tier(path: str) -> Reader:
    """One number of each tier; a tier without it has no series."""
    return of_tiers(lambda status: [((), found(status, path))] if _is_number(found(status, path)) else [])


def tier_each(paths: Mapping[str, str]) -> Reader:
    """Numbers of each tier, by a second label."""
    return of_tiers(each(paths))


def tier_counts(path: str) -> Reader:
    """What a map of each tier has, by its keys; a tier without it has no series."""
    return of_tiers(lambda status: (row for row in counts(path)(status) if isinstance(row[1], int | float | Mapping)))


def tier_rows(path: str, name: str, value: Callable[[Mapping[str, Any]], Value]) -> Reader:
    """A number of each row of a list of each tier, by the row's name. Plugins make these rows: what is none is passed
    over."""

    def read(status: Document) -> Iterator[tuple[Labels, Value]]:
        rows = found(status, path)
        for row in rows if isinstance(rows, list) else ():
            if isinstance(row, Mapping) and name in row and _is_number(number := value(row)):
                yield (str(row[name]),), number

    return of_tiers(read)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _map(node: Any, path: str) -> dict[str, Any]:
    value = found(node, path)
    return dict(value) if isinstance(value, Mapping) else {}


def found_tokens(document: Document) -> Iterator[tuple[Labels, Value]]:
    """Tokens of lookups by model and by where they were found; the rest is missed."""
    for model, row in ({"other": {}} | (found(document, "lookups.by_model") or {})).items():
        asked, l1, l2 = (row.get(name, 0) for name in ("asked_tokens", "l1_tokens", "l2_tokens"))
        yield (model, "l1"), l1
        yield (model, "l2"), l2
        yield (model, "missed"), asked - l1 - l2


def tokens_by_place(document: Document) -> dict[str, float]:
    """Tokens of all models' lookups by where they were found."""
    sums: dict[str, float] = {"l1": 0, "l2": 0, "missed": 0}
    for (_, where), amount in found_tokens(document):
        sums[where] += amount
    return sums


def l1_bytes(document: Document) -> Iterator[tuple[Labels, Value]]:
    """The resident bytes, each in one state."""
    used, free, quarantined = (found(document, f"l1.{name}_bytes") or 0 for name in ("used", "free", "quarantined"))
    yield from ((("used",), used - quarantined), (("free",), free), (("quarantined",), quarantined))


def capacities(document: Document) -> Iterator[tuple[Labels, Value]]:
    """The hit rates by capacity."""
    for point in found(document, "l1.more_capacity") or ():
        yield (str(point["capacity_bytes"]),), point["hit_rate"]


# 1 for a tier whose circuits are both closed.
tier_up = of_tiers(lambda status: [((), int(status["state"] == "closed"))])


def _problems(status: Document) -> Iterator[tuple[Labels, Value]]:
    facts = dict.fromkeys(status.get("problems", ()), 1) or {"": 0}
    return (((fact,), value) for fact, value in facts.items())


# 1 for each problem that a tier reports, with its words, of which there are few; 0 for a tier without any.
tier_problems = of_tiers(_problems)
# 1 for a circuit that stops calls.
circuits = of_tiers(lambda status: (((which,), int(state != "closed")) for which, state in status["circuits"].items()))


def error_answers(document: Document) -> Iterator[tuple[Labels, Value]]:
    """Error answers by code: those of the core, and what plugins answered with."""
    counters = found(document, "messaging.counters") or {}
    answered = {name.removeprefix("errors."): n for name, n in counters.items() if name.startswith("errors.")}
    yield from (((code,), value) for code, value in (dict.fromkeys(CODES, 0) | answered).items())


def accepting(document: Document) -> Iterator[tuple[Labels, Value]]:
    """1 for each kind of new connection that is accepted."""
    descriptors = found(document, "messaging.descriptors") or {}
    yield from (((what,), int(descriptors.get(what, True))) for what in ("local", "readers", "sessions"))


def devices(field: str) -> Reader:
    """A field of each device; of `pid`, whether there is a process."""

    def read(document: Document) -> Iterator[tuple[Labels, Value]]:
        for name, status in (document.get("transports") or {}).items():
            for device in status.get("devices", ()) if isinstance(status, dict) else ():
                value = device.get(field)
                yield (name, str(device["device"])), int(value is not None) if field == "pid" else value

    return read


def _own(status: object) -> Iterator[tuple[Labels, Value]]:
    return (((what,), each.value) for what, each in own_counters(status).items())


# The counters that the plugins of tiers and of transports declare themselves.
tier_own = of_tiers(lambda status: _own(status.get("details")))


def transport_own(document: Document) -> Iterator[tuple[Labels, Value]]:
    for name, status in (document.get("transports") or {}).items():
        yield from (((name, *labels), value) for labels, value in _own(status))


def started(document: Document) -> Iterator[tuple[Labels, Value]]:
    """The start of the server."""
    yield (), datetime.fromisoformat(document["server"]["started_at"]).timestamp()


def build(document: Document) -> Iterator[tuple[Labels, Value]]:
    """1, with the release."""
    yield (str(found(document, "server.version") or ""),), 1


def length(path: str) -> Reader:
    """How many items a list has."""
    return lambda document: iter([((), len(found(document, path) or ()))])
