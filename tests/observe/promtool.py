"""Alerts over time by Prometheus's own evaluation: polls become the series of `promtool test rules`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvf_observe.http.exposition import family
from kvf_observe.metrics import METRICS, OWN, own_document
from kvf_observe.poller import Observed
from tests.observe.documents import NOW

RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "kvframework.rules.yml"
NEEDED = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")


class Alert(NamedTuple):
    """A rule of the file; `row` is the anchor of its row in docs/operations.md."""

    name: str
    expr: str
    row: str


_ALERT = re.compile(r"- alert: (\w+)\n +expr: (.+)\n(?: .+\n)+? +runbook_url: .+/docs/operations.md#(\S+)\n")
ALERTS = [Alert(name, json.loads(expr), row) for name, expr, row in _ALERT.findall(RULES.read_text())]
# The recorded series, by name.
RECORDS = {name: json.loads(expr) for name, expr in re.findall(r"- record: (\S+)\n +expr: (.+)\n", RULES.read_text())}
_NAMES = {name for alert in ALERTS for name in re.findall(r"kvframework_\w+", alert.expr)}


class Timeline(NamedTuple):
    """The poll of each minute up to `minutes`, None where Prometheus gets no answer, and the alerts that fire then."""

    title: str
    at: Callable[[int], Observed | None]
    minutes: int
    fire: Collection[str]
    every: int = 1


def complaints(timelines: Collection[Timeline], folder: Path) -> str:
    """What promtool says of alerts that do not fire, or that should not; "" if all is as expected. Blocking."""
    file = folder / "alerts.test.json"
    file.write_text(
        json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": list(map(_group, timelines))})
    )
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=280, check=False
    )
    return "" if done.returncode == 0 else f"{done.stdout}{done.stderr}"


def _group(timeline: Timeline) -> dict[str, Any]:
    samples = [dict(_samples(timeline.at(minute))) for minute in range(0, timeline.minutes + 1, timeline.every)]
    series = sorted({name for each in samples for name in each})
    return {
        "name": timeline.title,
        "interval": f"{timeline.every}m",
        "input_series": [
            {"series": name, "values": " ".join(each.get(name, "_") for each in samples)} for name in series
        ],
        "promql_expr_test": [
            {
                "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{timeline.minutes}m",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(timeline.fire)],
            }
        ],
    }


def _samples(observed: Observed | None) -> Iterator[tuple[str, str]]:
    yield 'up{job="kvframework"}', "0" if observed is None else "1"
    if observed is None:
        return
    own = own_document(observed, NOW)
    for metric in METRICS:
        document = own if metric in OWN else observed.document
        if metric.full in _NAMES and document is not None:
            for line in family(metric, document):
                name, _, value = line.rpartition(" ")
                if not line.startswith("#"):
                    yield name, value
