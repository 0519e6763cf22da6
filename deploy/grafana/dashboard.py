"""The dashboards for Grafana: one for a fleet, and for single nodes an overview with a panel for each metric of
the table. `python -m tests.docs.generate` writes them. Pure."""

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
    ("Tokens found in L1 and L2 per second", "short", {"{{instance}}": _tokens(', found=~"l1|l2"')}),
    (
        "Current problems by check",
        "short",
        {"{{where}} {{instance}}": f"kvframework_problem{{{_HERE}}} > 0"},
    ),
)


# Of the fleet: one value, a table with a row for each series, or lines over time; all of the chosen nodes and clusters.
# The rules of `deploy/prometheus` record its rates; those of histograms are of all nodes of a cluster.
_CLUSTER = 'cluster=~"$cluster"'
_FLEET = f'instance=~"$instance", {_CLUSTER}'
_MODEL = f'{_FLEET}, model=~"$model"'


def _rate(metric: str, matchers: str = _FLEET, by: str = "") -> str:
    return f"sum{f' by ({by}) ' if by else ''}(rate(kvframework_{metric}{{{matchers}}}[$__rate_interval]))"


def _recorded(name: str, matchers: str = _FLEET, by: str = "") -> str:
    level, _, metric = name.partition(":")
    return f"sum{f' by ({by}) ' if by else ''}({level}:kvframework_{metric}:rate5m{{{matchers}}})"


def _quantile(quantile: float, histogram: str, matchers: str = _CLUSTER, by: str = "le") -> str:
    return f"histogram_quantile({quantile}, {_recorded(f'{histogram}_seconds_bucket', matchers, by)})"


def _hit_rate(by: str = "") -> str:
    found = f'{_MODEL}, found=~"l1|l2"'
    return f"{_recorded('instance:lookup_tokens', found, by)} / {_recorded('instance:lookup_tokens', _MODEL, by)}"


_WORST, _TOP = 10, 10
# Kind, title, unit, and queries by legend.
FLEET: tuple[tuple[str, str, str, Mapping[str, str]], ...] = (
    (
        "stat",
        "Nodes up, hit rate, prefill saved per hour",
        "short",
        {
            "nodes up": f"sum(kvframework_up{{{_FLEET}}})",
            "nodes": f"count(kvframework_up{{{_FLEET}}})",
            "hit rate": _hit_rate(),
            "prefill saved, s per hour": f"3600 * {_recorded('instance:prefill_saved_seconds')}",
        },
    ),
    ("timeseries", "Hit rate by model", "percentunit", {"{{model}}": _hit_rate("model")}),
    ("table", "Nodes with the lowest hit rate", "percentunit", {"": f"bottomk({_WORST}, {_hit_rate('instance')})"}),
    (
        "timeseries",
        "Latency of lookups and loads",
        "s",
        {
            f"{request} {name}": _quantile(quantile, "type:request", f'{_CLUSTER}, type="{request}"')
            for request in ("LOOKUP", "PREPARE_RETRIEVE", "RETRIEVE")
            for name, quantile in _QUANTILES.items()
        },
    ),
    (
        "timeseries",
        "Share of L1 in use, and share of its objects evicted per second",
        "percentunit",
        {
            "L1 in use": f'sum(kvframework_l1_bytes{{{_FLEET}, state="used"}}) '
            f"/ sum(kvframework_l1_capacity_bytes{{{_FLEET}}})",
            "objects evicted per second": f"{_recorded('instance:l1_evictions')} "
            f"/ sum(kvframework_l1_objects{{{_FLEET}}})",
        },
    ),
    ("timeseries", "Idle time of evicted objects", "s", {"median": _quantile(0.5, "cluster:l1_evicted_idle")}),
    (
        "table",
        "Tiers that are down, slow or failing",
        "short",
        {
            "nodes where the tier is down": f"count by (tier) (kvframework_tier_up{{{_FLEET}}} == 0)",
            "load time 99 %, s": _quantile(0.99, "tier:tier_load", by="le, tier"),
            "failed calls per second": _rate("tier_calls_failed_total", by="tier"),
            "objects never written per second": _rate("tier_never_written_total", by="tier"),
        },
    ),
    (
        "timeseries",
        "Error replies, failed client calls and dropped stores per second",
        "short",
        {
            "error replies: {{code}}": f"topk(5, {_rate('refused_total', by='code')})",
            "client calls failed: {{what}}": _rate("client_lost_total", by="what"),
            "stores dropped, L1 full": _rate("l1_object_events_total", f'{_FLEET}, what="dropped"'),
        },
    ),
    ("table", "Server versions in use", "short", {"nodes": f"count by (version) (kvframework_build_info{{{_FLEET}}})"}),
    (
        "table",
        "Models and tenants by prefill saved and tokens found",
        "short",
        {
            f"{by}, {unit}": f"topk({_TOP}, {scale}{_recorded(f'instance_{by}:{metric}', matchers, by)})"
            for unit, scale, metric in (
                ("s per hour", "3600 * ", "prefill_saved_seconds"),
                ("tokens per second", "", "hit_tokens"),
            )
            for by, matchers in (("model", _MODEL), ("tenant", _FLEET))
        },
    ),
    (
        "table",
        "Firing alerts",
        "short",
        {"nodes": 'count by (alertname, severity) (ALERTS{alertstate="firing", alertname=~"Kvframework.*"})'},
    ),
)


def fleet() -> str:
    """The dashboard of a fleet as JSON."""
    panels: list[dict[str, Any]] = []
    for number, (kind, title, unit, queries) in enumerate(FLEET):
        panel = _panel(title, unit, queries, kind)
        x, y = number % 2 * 12, number // 2 * _HEIGHT
        panels.append({"id": number + 1, **panel, "gridPos": _at(x, y, 12, _HEIGHT)})
    variables = [
        _variable("cluster", "cluster", "label_values(kvframework_up, cluster)"),
        _variable("instance", "node", "label_values(kvframework_up, instance)"),
        _variable("model", "model", "label_values(kvframework_lookup_tokens_total, model)"),
    ]
    return _document("kvframework-fleet", "kvframework: fleet", panels, variables)


def dashboard() -> str:
    """The dashboard of single nodes as JSON, for the import of Grafana and for provisioning."""
    variables = [_variable("instance", "node", "label_values(kvframework_up, instance)")]
    return _document("kvframework", "kvframework", list(_placed()), variables)


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    # Series without the label count, too: `.*` for all.
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _document(uid: str, title: str, panels: list[dict[str, Any]], variables: list[dict[str, Any]]) -> str:
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    document = {
        "title": title,
        "uid": uid,
        "tags": ["kvframework"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [source, *variables]},
        "panels": panels,
    }
    return json.dumps(document, indent=1) + "\n"


def _placed() -> Iterator[dict[str, Any]]:
    """The overview, and rows with their panels, which are collapsed; each with its place."""
    y, number = 0, 0
    sections = [("Overview", [_panel(*each) for each in OVERVIEW])]
    sections += [(title, [_of(metric) for metric in metrics]) for title, metrics in TABLE.items()]
    sections += [("Observing", [_of(metric) for metric in OWN])]
    for title, panels in sections:
        number += 1
        row = {"id": number, "type": "row", "title": title, "collapsed": y > 0, "gridPos": _at(0, y, 24, 1)}
        placed = []
        for index, panel in enumerate(panels):
            number += 1
            x, below = index * _WIDTH % _COLUMNS, index * _WIDTH // _COLUMNS * _HEIGHT
            placed.append({"id": number, **panel, "gridPos": _at(x, y + 1 + below, _WIDTH, _HEIGHT)})
        if row["collapsed"]:
            yield {**row, "panels": placed}
            y += 1
        else:
            yield {**row, "panels": []}
            yield from placed
            y += 1 + -(-len(panels) * _WIDTH // _COLUMNS) * _HEIGHT


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


def _panel(title: str, unit: str, queries: Mapping[str, str], kind: str = "timeseries") -> dict[str, Any]:
    targets: list[dict[str, Any]] = [
        {"refId": chr(ord("A") + number), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
        for number, (legend, query) in enumerate(queries.items())
    ]
    for target in targets:
        if unit == "dateTimeFromNow":
            target["expr"] = f"{target['expr']} * 1000"
        if kind != "timeseries":
            target |= {"instant": True, **({"format": "table"} if kind == "table" else {})}
    panel: dict[str, Any] = {
        "type": kind,
        "title": title[:1].upper() + title[1:],
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": targets,
    }
    if kind == "timeseries":
        panel["options"] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    elif kind == "table":
        names = {
            f"Value #{target['refId']}" if len(targets) > 1 else "Value": target["legendFormat"] for target in targets
        }
        organised = {"excludeByName": {"Time": True}, "renameByName": {at: name for at, name in names.items() if name}}
        panel["transformations"] = [{"id": "merge", "options": {}}, {"id": "organize", "options": organised}]
    return panel
