"""How a metric's values are read from a status document: by paths, for each tier, for each name. Pure.

What a server of another release does not have reads as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvf_observe.http.exposition import Document, Labels, Reader, Value

_EMPTY = {"first": 1.0, "counts": (0,), "sum": 0.0}


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


def counts(path: str, always: Sequence[str] = ()) -> Reader:
    """The numbers of a map by its keys, and 0 for `always`."""

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


def histograms(path: str) -> Reader:
    """The histograms of a map by its keys."""
    return counts(path)


def histogram(path: str) -> Reader:
    """One histogram."""
    return lambda document: iter([((), found(document, path) or _EMPTY)])


def tier_names(document: Document) -> list[str]:
    """The tiers' labels, in the order of the TOML: their names, with a number where two have the same."""
    names = [str(tier["name"]) for tier in document.get("l2", ())]
    return [name if names.count(name) == 1 else f"{name}.{number}" for number, name in enumerate(names)]


def tier(path: str) -> Reader:
    """One number of each tier; a tier without it has no series."""

    def read(document: Document) -> Iterator[tuple[Labels, Value]]:
        for name, status in zip(tier_names(document), document.get("l2", ()), strict=True):
            value = found(status, path)
            if isinstance(value, int | float):
                yield (name,), value

    return read


def tier_each(paths: Mapping[str, str]) -> Reader:
    """Numbers of each tier, by a second label."""

    def read(document: Document) -> Iterator[tuple[Labels, Value]]:
        for name, status in zip(tier_names(document), document.get("l2", ()), strict=True):
            yield from (((name, label), found(status, path) or 0) for label, path in paths.items())

    return read


def tier_histograms(path: str) -> Reader:
    """Histograms of each tier, by a second label."""
    return tier_counts(path)


def tier_counts(path: str) -> Reader:
    """What a map of each tier has, by its keys; a tier without it has no series."""

    def read(document: Document) -> Iterator[tuple[Labels, Value]]:
        for name, status in zip(tier_names(document), document.get("l2", ()), strict=True):
            for label, value in _map(status, path).items():
                if isinstance(value, int | float | Mapping):
                    yield (name, label), value

    return read


def tier_rows(path: str, name: str, value: Callable[[Mapping[str, Any]], Value]) -> Reader:
    """A number of each row of a list of each tier, by the row's name. Plugins make these rows: what is none is passed
    over."""

    def read(document: Document) -> Iterator[tuple[Labels, Value]]:
        for of_tier, status in zip(tier_names(document), document.get("l2", ()), strict=True):
            rows = found(status, path)
            for row in rows if isinstance(rows, list) else ():
                if isinstance(row, Mapping) and name in row and isinstance(number := value(row), int | float):
                    yield (of_tier, str(row[name])), number

    return read


def _map(node: Any, path: str) -> dict[str, Any]:
    value = found(node, path)
    return dict(value) if isinstance(value, Mapping) else {}
