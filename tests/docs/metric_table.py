"""Makes docs/metrics.md out of the table of metrics."""

from __future__ import annotations

from kvf_observe.http.exposition import Metric
from kvf_observe.metrics import OWN, TABLE

HEAD = """# Metrics

What `/metrics` of [`kvframework observe`](observe.md) says, and where each value stands in the
[status document](status.md). Names are stable, as those of the document. All series exist from the
start of the server, at 0, but those of other nodes, which only [peers](peers.md) have; while it is
away there are only those of the first table. A histogram's bounds are doublings. `model` has at
most 64 names and `other`, `tenant` the names of the configuration; two tiers of one plugin are
called `redis.0` and `redis.1`.
"""


def page() -> str:
    """The page, without its note."""
    parts = [HEAD, _section("Observing", OWN)]
    parts += [_section(title, metrics) for title, metrics in TABLE.items()]
    return "\n".join(parts)


def _section(title: str, metrics: tuple[Metric, ...]) -> str:
    lines = [f"## {title}", "| metric | type | labels | meaning | in the status document |", "|---|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        places = ", ".join(f"`{place}`" for place in metric.place.split(", ") if place)
        meaning = f"[{metric.help}](operations.md#{metric.row})" if metric.row else metric.help
        lines.append(f"| `{metric.full}` | {metric.type} | {labels} | {meaning} | {places} |")
    return "\n".join([*lines, ""])
