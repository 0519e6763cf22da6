"""Families of metrics, and their text: Prometheus 0.0.4, or OpenMetrics 1.0. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

PREFIX = "kvframework_"
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
# A label's value may come from a client.
LONGEST_LABEL = 128

Type = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]
Document = Mapping[str, Any]
# A number, or a histogram as `kvframework.api.counter.Histogram.octaves` makes it.
Value = Any
Reader = Callable[[Document], Iterator[tuple[Labels, Value]]]


class Metric(NamedTuple):
    """One family of series. `name` is without the prefix; `place` is where its values stand in the status document, ""
    for what `observe` itself knows; `row` is the anchor of the row of docs/operations.md about values that are wrong,
    "" where none is."""

    name: str
    type: Type
    help: str
    place: str
    read: Reader
    labels: Labels = ()
    row: str = ""

    @property
    def full(self) -> str:
        """The name of the samples, without a histogram's suffix."""
        return PREFIX + self.name


def wants_open_metrics(accept: str) -> bool:
    """Whether a scraper with this header `accept` takes OpenMetrics."""
    return "application/openmetrics-text" in accept


def exposition(metrics: Iterable[tuple[Metric, Document]], *, open_metrics: bool) -> bytes:
    """The text of families, each read from its document."""
    lines = [line for metric, document in metrics for line in family(metric, document, open_metrics=open_metrics)]
    return "\n".join([*lines, "# EOF\n" if open_metrics else ""]).encode("utf-8", "replace")


def family(metric: Metric, document: Mapping[str, Any], *, open_metrics: bool = False) -> Iterator[str]:
    """The lines of one family; `document` is the status document, or `own_document`."""
    name = metric.full.removesuffix("_total") if open_metrics and metric.type == "counter" else metric.full
    yield f"# HELP {name} {_escaped(metric.help)}."
    yield f"# TYPE {name} {metric.type}"
    for labels, value in _merged(metric, document).items():
        pairs = [f'{key}="{_escaped(text)}"' for key, text in zip(metric.labels, labels, strict=True)]
        if metric.type == "histogram":
            yield from _buckets(metric.full, pairs, value)
        else:
            yield f"{metric.full}{_braced(pairs)} {_number(value)}"


def _merged(metric: Metric, document: Mapping[str, Any]) -> dict[Labels, Any]:
    """The values by labels of bounded length; what that makes equal is added up."""
    merged: dict[Labels, Any] = {}
    for labels, value in metric.read(document):
        short = tuple(label[:LONGEST_LABEL] for label in labels)
        merged[short] = merged[short] + value if short in merged and metric.type != "histogram" else value
    return merged


def _buckets(name: str, pairs: list[str], histogram: Mapping[str, Any]) -> Iterator[str]:
    counts, seen, end = histogram["counts"], 0, float(histogram["first"])
    for count in counts[:-1]:
        seen, end = seen + count, end * 2
        bound = f'le="{end!r}"'
        yield f"{name}_bucket{_braced([*pairs, bound])} {seen}"
    seen += counts[-1]
    last = 'le="+Inf"'
    yield f"{name}_bucket{_braced([*pairs, last])} {seen}"
    yield f"{name}_sum{_braced(pairs)} {_number(histogram['sum'])}"
    yield f"{name}_count{_braced(pairs)} {seen}"


def _braced(pairs: list[str]) -> str:
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _number(value: float | None) -> str:
    return repr(value or 0) if not isinstance(value, bool) else str(int(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
