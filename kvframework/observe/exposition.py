"""The text of /metrics: Prometheus 0.0.4, or OpenMetrics 1.0 where the scraper accepts it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvframework.observe.metrics import METRICS, NOTHING_TRACED, OWN, Metric, own_document
from kvframework.observe.poller import Observed
from kvframework.observe.readings import LONGEST_LABEL, Labels

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def exposition(
    observed: Observed, now: float, traced: Mapping[str, int] = NOTHING_TRACED, *, open_metrics: bool
) -> bytes:
    """All families. Without a status document only those of `OWN`: the others' series end, and go on with the server.

    A counter of a server that could not be asked would otherwise seem to fall to 0 and to grow by all it had."""
    own = own_document(observed, now, traced)
    lines: list[str] = []
    for metric in OWN if observed.document is None else METRICS:
        document = own if metric in OWN else observed.document
        lines += family(metric, document or {}, open_metrics=open_metrics)
    if open_metrics:
        lines.append("# EOF")
    return ("\n".join(lines) + "\n").encode("utf-8", "replace")


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
