"""The dashboard for Grafana: an overview, and a panel for each metric of the table. `python -m tests.docs.generate`
writes it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvf_observe.http.exposition import Metric
from kvf_observe.metrics import OWN, TABLE

_HERE = 'instance=~"$instance"'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 24
_QUANTILES = {"median": 0.5, "99 %": 0.99}


def _tokens(found: str = "") -> str:
    return f"sum by (instance) (rate(kvframework_lookup_tokens_total{{{_HERE}{found}}}[$__rate_interval]))"


# Title, unit, and queries by legend.
OVERVIEW: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    (
        "Hit rate by tier",
        "percentunit",
        {
            f"{tier} {{{{instance}}}}": f"{_tokens(f', found={json.dumps(tier)}')} / {_tokens()}"
            for tier in ("l1", "l2")
        },
    ),
    ("Tokens loaded instead of computed per second", "short", {"{{instance}}": _tokens(', found=~"l1|l2"')}),
    (
        "Current problems",
        "short",
        {"{{where}} {{instance}}": f"kvframework_problem{{{_HERE}}} > 0"},
    ),
)


def dashboard() -> str:
    """The dashboard as JSON, for the import of Grafana and for provisioning."""
    panels = list(_placed())
    document = {
        "title": "kvframework",
        "uid": "kvframework",
        "tags": ["kvframework"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                {
                    "name": "instance",
                    "label": "node",
                    "type": "query",
                    "datasource": _SOURCE,
                    "query": {"query": "label_values(kvframework_up, instance)", "refId": "instance"},
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": panels,
    }
    return json.dumps(document, indent=1) + "\n"


def _placed() -> Iterator[dict[str, Any]]:
    """Rows and their panels, each with its place."""
    y, number = 0, 0
    sections = [("Overview", [_panel(*each) for each in OVERVIEW])]
    sections += [(title, [_of(metric) for metric in metrics]) for title, metrics in TABLE.items()]
    sections += [("Observing", [_of(metric) for metric in OWN])]
    for title, panels in sections:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": _at(0, y, 24, 1),
        }
        y += 1
        for index, panel in enumerate(panels):
            number += 1
            x = index * _WIDTH % _COLUMNS
            if index and x == 0:
                y += _HEIGHT
            yield {"id": number, **panel, "gridPos": _at(x, y, _WIDTH, _HEIGHT)}
        y += _HEIGHT


def _at(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _of(metric: Metric) -> dict[str, Any]:
    """The panel of one metric: the rate of a counter, the quantiles of a histogram, a gauge as it is."""
    by = ", ".join(("instance", *metric.labels))
    legend = " ".join(f"{{{{{label}}}}}" for label in (*metric.labels, "instance"))
    unit = next((u for end, u in _UNITS.items() if metric.name.removesuffix("_total").endswith(end)), "short")
    if metric.type == "counter":
        query = f"sum by ({by}) (rate({metric.full}{{{_HERE}}}[$__rate_interval]))"
        return _panel(
            f"{metric.help}, per second" if "," in metric.help else f"{metric.help} per second",
            "Bps" if unit == "bytes" else "short",
            {legend: query},
        )
    if metric.type == "histogram":
        rate = f"sum by (le, {by}) (rate({metric.full}_bucket{{{_HERE}}}[$__rate_interval]))"
        queries = {f"{name} {legend}": f"histogram_quantile({q}, {rate})" for name, q in _QUANTILES.items()}
        return _panel(metric.help, unit, queries)
    return _panel(metric.help, unit, {legend: f"{metric.full}{{{_HERE}}}"})


_UNITS = {
    "start_time_seconds": "dateTimeFromNow",
    "_seconds": "s",
    "_bytes": "bytes",
    "hit_rate_by_capacity": "percentunit",
}


def _panel(title: str, unit: str, queries: Mapping[str, str]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + number), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
        for number, (legend, query) in enumerate(queries.items())
    ]
    if unit == "dateTimeFromNow":
        for target in targets:
            target["expr"] = f"{target['expr']} * 1000"
    return {
        "type": "timeseries",
        "title": title[:1].upper() + title[1:],
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }
