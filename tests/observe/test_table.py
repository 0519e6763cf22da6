"""What is made from the table of metrics names what exists: places, rows, panels, alerts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvf_observe.app import exposition
from kvf_observe.health import CHECKS, check_of
from kvf_observe.http.exposition import PREFIX
from kvf_observe.metrics import METRICS, TABLE
from kvf_observe.poller import LOADING
from kvframework.status import COUNTERS, REASONS
from kvframework.status import places as fields
from tests.docs.prose import anchors
from tests.observe.documents import NOW, answered, document
from tests.observe.promtool import ALERTS, RECORDS
from tests.support import doc_tables

ROOT = Path(__file__).resolve().parents[2]
STATUS = (ROOT / "docs" / "status.md").read_text()
OPERATIONS = ROOT / "docs" / "operations.md"
GRAFANA = ROOT / "deploy" / "grafana"
DASHBOARDS = {name: json.loads((GRAFANA / f"{name}.json").read_text()) for name in ("kvframework", "kvframework-fleet")}
NAME = re.compile(r"(?<!:)\bkvframework_[a-z0-9_]+")
RECORDED = re.compile(r"\w+:kvframework_[a-z0-9_]+:rate5m")
SUFFIXES = ("", "_bucket", "_sum", "_count")


def series() -> set[str]:
    text = exposition(answered(), NOW, open_metrics=False).decode()
    found = {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}
    return found | {f"{PREFIX}{name}" for name in ("l1_hit_rate_by_capacity", "tier_own_total", "transport_own_total")}


def queries() -> list[str]:
    targets = [target["expr"] for name in DASHBOARDS for panel in panels(name) for target in panel.get("targets", ())]
    chosen = [each for dashboard in DASHBOARDS.values() for each in dashboard["templating"]["list"]]
    variables = [each["query"]["query"] for each in chosen if each["type"] == "query"]
    return [*targets, *variables, *RECORDS.values(), *(alert.expr for alert in ALERTS)]


def panels(name: str) -> list[dict[str, Any]]:
    return [each for panel in DASHBOARDS[name]["panels"] for each in (panel, *panel.get("panels", ()))]


def places() -> set[str]:
    return {place for metric in METRICS for place in metric.place.split(", ") if place}


def test_names_are_unique_and_well_formed() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch("[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.type == "counter"), metric.name
        assert metric.help
        assert not metric.help.endswith(".")


def test_every_place_is_a_field_of_the_status_document() -> None:
    rows = doc_tables.rows(STATUS, "Fields of the status document")
    told = {name for row in rows for name in re.findall(r"`([^`]+)`", row[0])} | {"messaging.counters.errors.CODE"}
    assert sorted(places() - {place for place, _ in fields()} - told) == []


def test_every_row_is_a_row() -> None:
    rows = {metric.row for metric in METRICS} | {check.row for check in CHECKS} | {alert.row for alert in ALERTS}
    assert sorted(rows - {""} - anchors(OPERATIONS)) == []
    assert all(check.row for check in CHECKS)


def test_every_counter_is_in_its_metric() -> None:
    of = {metric.name: metric.place.split(", ") for metric in METRICS}
    assert [place for place, counter in COUNTERS.items() if place not in of[counter.metric]] == []


def test_every_problem_of_a_server_belongs_to_a_check() -> None:
    source = (ROOT / "kvframework" / "service" / "health.py").read_text().partition("def _counters")[0]
    found = set(re.findall(r'yield "([a-z0-9_.]+)", ', source)) | {"l2.0"}
    assert len(found) > 5
    assert [where for where in found if not check_of(where).row] == []


def test_every_query_names_series_that_exist() -> None:
    there = series()
    for query in queries():
        names, recorded = NAME.findall(query), set(RECORDED.findall(query))
        assert recorded <= RECORDS.keys(), query
        assert names or recorded or query.startswith(("up{", "count by (alertname")), query  # Prometheus's own
        assert [name for name in names if name not in there] == [], query


def test_every_label_in_a_query_is_one_of_its_metric() -> None:
    labels = {
        metric.full + suffix: {*metric.labels, "instance", "cluster"} for metric in METRICS for suffix in SUFFIXES
    }
    labels |= {name: set(re.findall(r"\w+", expr.split(")")[0].partition("(")[2])) for name, expr in RECORDS.items()}
    for query in queries():
        for name, matchers in re.findall(r"\b((?:\w+:)?kvframework_[a-z0-9_:]+)\{([^}]*)\}", query):
            assert {each[0] for each in re.findall(r"(\w+)\s*(=~|!~|!=|=)", matchers)} <= labels[name], query


def test_every_value_of_a_label_in_a_rule_is_one() -> None:
    text = exposition(answered(), NOW, open_metrics=False).decode()
    for name, expr in [*RECORDS.items(), *((alert.name, alert.expr) for alert in ALERTS)]:
        for label, values in re.findall(r'(\w+)=~?"([^"]*)"', expr):
            for value in values.split("|") if label != "job" else ():
                assert f'{label}="{value}"' in text, name


def test_every_metric_has_a_panel() -> None:
    shown = {
        name
        for panel in panels("kvframework")
        for target in panel.get("targets", ())
        for name in NAME.findall(target["expr"])
    }
    assert [
        metric.name for metric in METRICS if metric.full not in {name.removesuffix("_bucket") for name in shown}
    ] == []
    assert [title for title in TABLE if title not in {panel["title"] for panel in panels("kvframework")}] == []


@pytest.mark.parametrize("name", DASHBOARDS)
def test_no_two_panels_lie_on_each_other(name: str) -> None:
    for shown in (DASHBOARDS[name]["panels"], *(panel.get("panels", ()) for panel in DASHBOARDS[name]["panels"])):
        taken: set[tuple[int, int]] = set()
        for panel in shown:
            at: dict[str, Any] = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert not cells & taken
            assert at["x"] + at["w"] <= 24
            taken |= cells
    assert len({panel["id"] for panel in panels(name)}) == len(panels(name))


def test_fixed_values_of_labels_are_those_of_the_server() -> None:
    status = document()
    assert set(REASONS) == set(status["lookups"]["misses"])
    assert LOADING in status["l2"][0]["seconds"]
