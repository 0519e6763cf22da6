"""The text of /metrics: Prometheus 0.0.4, or OpenMetrics 1.0 where the scraper accepts it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kvframework.http.exposition import family
from kvframework.observe.metrics import METRICS, NOTHING_TRACED, OWN, own_document
from kvframework.observe.poller import Observed


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
