"""The text of /metrics is what the parsers of Prometheus read, with every series of the table from the start."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parsed_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parsed_text

from kvf_observe.app import exposition
from kvf_observe.http.exposition import PREFIX
from kvf_observe.metrics import METRICS, OWN
from kvf_observe.poller import Observed
from kvframework.api.counter import Counter, Counts
from kvframework.status import REASONS
from kvframework.wire.protocol import REQUESTS
from tests.observe.documents import NOW, answered, document, unanswered

PROMISED = """
lookups_total lookup_tokens_total misses_total l1_bytes l1_evictions_total l1_evicted_idle_seconds
l1_wanted_after_eviction_seconds request_seconds tier_seconds tier_bytes_total tier_up refused_total problem
client_lost_total build_info
"""

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def text(observed: Observed | None = None) -> str:
    return exposition(observed or answered(), NOW, open_metrics=False).decode()


def samples(observed: Observed | None = None) -> Samples:
    """All samples by name and labels; two of one name and labels are an error."""
    found: Samples = {}
    for family in parsed_text(text(observed)):
        for sample in family.samples:
            key = sample.name.removeprefix(PREFIX), frozenset(sample.labels.items())
            assert key not in found, key
            found[key] = sample.value
    return found


def value(observed: Observed, name: str, **labels: str) -> float:
    return samples(observed)[name, frozenset(labels.items())]


def test_both_formats_are_parsed_and_say_the_same() -> None:
    plain = {family.name: len(family.samples) for family in parsed_text(text())}
    made = exposition(answered(), NOW, open_metrics=True).decode()
    assert made.endswith("\n# EOF\n")
    assert {family.name: len(family.samples) for family in parsed_open_metrics(made)} == plain
    assert {PREFIX + metric.name.removesuffix("_total") for metric in METRICS} == set(plain)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
def test_promtool_has_no_complaint() -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text(), capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_promised_names_are_there() -> None:
    assert set(PROMISED.split()) <= {metric.name for metric in METRICS}


def test_every_metric_has_series_from_the_start() -> None:
    found = {name for name, _ in samples()}
    missing = [metric.name for metric in METRICS if not {metric.name, f"{metric.name}_count"} & found]
    assert sorted({*missing, "l1_hit_rate_by_capacity"}) == [
        "l1_hit_rate_by_capacity",
        "tier_own_total",
        "transport_own_total",
    ]
    counts = Counts(renewed=Counter("leases"))
    counts.add("renewed", 3)
    declared = document(l2__0__details__counters=counts.status(), transports__cuda_ipc__counters=counts.status())
    own = samples(answered(declared))
    assert own["tier_own_total", frozenset({("tier", "filesystem"), ("what", "renewed")})] == 3
    assert own["transport_own_total", frozenset({("transport", "cuda_ipc"), ("what", "renewed")})] == 3
    series = samples()
    for reason in REASONS:
        assert series["misses_total", frozenset({("reason", reason)})] == 0
    for name in REQUESTS:
        assert series["request_seconds_count", frozenset({("type", name)})] >= 0


def test_a_server_that_is_away_is_down_and_has_no_other_numbers() -> None:
    found = samples(unanswered())
    assert found["up", frozenset()] == 0
    assert found["problem", frozenset({("where", "server")})] == 1
    assert {name for name, _ in found} == {metric.name for metric in OWN}


def test_values_come_from_their_places() -> None:
    tokens = {"lookups": 3, "asked_tokens": 100, "l1_tokens": 60, "l2_tokens": 30}
    changed = document(
        lookups__by_model={"tiny": tokens},
        lookups__misses={"evicted": 2},
        l1__used_bytes=300,
        l1__quarantined_bytes=100,
        l1__evicted={"room": 5, "watermark": 6, "tenant": 7, "hinted": 4},
        l2__1__circuits__write="open",
        l2__1__state="open",
        l2__0__bytes_read=11,
        messaging__counters={"errors.run.handler": 4, "errors.of.a.plugin": 1, "late": 9},
        use={"tenants": {"a": {"bytes": 12, "hit_tokens": 13}}},
    )
    observed = answered(changed)
    assert value(observed, "lookup_tokens_total", model="tiny", found="missed") == 10
    assert value(observed, "lookup_tokens_total", model="tiny", found="l2") == 30
    assert value(observed, "misses_total", reason="evicted") == 2
    assert value(observed, "l1_bytes", state="used") == 200
    assert value(observed, "l1_bytes", state="quarantined") == 100
    assert value(observed, "l1_evictions_total", cause="tenant") == 7
    assert value(observed, "tier_up", tier="redis") == 0
    assert value(observed, "tier_up", tier="filesystem") == 1
    assert value(observed, "tier_circuit_open", tier="redis", direction="write") == 1
    assert value(observed, "tier_bytes_total", tier="filesystem", direction="read") == 11
    assert value(observed, "refused_total", code="run.handler") == 4
    assert value(observed, "refused_total", code="of.a.plugin") == 1
    assert value(observed, "messaging_trouble_total", what="late") == 9
    assert value(observed, "tenant_bytes", tenant="a") == 12
    assert value(observed, "tenant_hit_tokens_total", tenant="a") == 13
    assert value(observed, "problem", where="l2.1") == 1
    assert value(observed, "problem", where="l2.0") == 0


def test_other_nodes_are_series_and_what_a_plugin_says_amiss_is_none() -> None:
    found = samples()
    assert value(answered(), "tier_node_up", tier="redis", node="10.0.0.8:9310") == 1
    assert value(answered(), "tier_node_up", tier="redis", node="10.0.0.9:9310") == 0
    assert value(answered(), "tier_node_bytes_total", tier="redis", node="10.0.0.8:9310") == 402653184
    assert value(answered(), "tier_lent_values_total", tier="redis") == 7
    assert value(answered(), "tier_lending_refused_total", tier="redis", why="strangers") == 4
    assert ("tier_node_values_total", frozenset({("tier", "redis"), ("node", "odd")})) not in found
    wrong = document(l2__1__details={"nodes": {"node": 1}, "lending": {"values": "many", "refused": {"why": "not"}}})
    assert {name for name, _ in found} - {name for name, _ in samples(answered(wrong))} == {
        "tier_node_up",
        "tier_node_values_total",
        "tier_node_bytes_total",
        "tier_node_failures_total",
        "tier_lent_values_total",
        "tier_lent_bytes_total",
        "tier_lending_refused_total",
    }


def test_a_histogram_is_cumulative_and_its_bounds_are_doublings() -> None:
    counts = [1, 2, 0, 4] + [0] * 15 + [5]
    status = document(requests={"LOOKUP": {"first": 1e-5, "counts": counts, "sum": 0.5}})
    observed = answered(status)
    buckets = {
        float(dict(labels)["le"]): amount
        for (name, labels), amount in samples(observed).items()
        if name == "request_seconds_bucket" and dict(labels)["type"] == "LOOKUP"
    }
    assert list(buckets.values())[:4] == [1, 3, 3, 7]
    assert list(buckets)[:3] == [2e-5, 4e-5, 8e-5]
    assert (buckets[float("inf")], value(observed, "request_seconds_count", type="LOOKUP")) == (12, 12)
    assert value(observed, "request_seconds_sum", type="LOOKUP") == 0.5


def test_two_tiers_of_one_plugin_have_labels_of_their_own() -> None:
    observed = answered(document(l2__1__name="filesystem", l2__1__hits=3))
    assert value(observed, "tier_values_total", tier="filesystem.1", what="hit") == 3
    assert value(observed, "tier_values_total", tier="filesystem.0", what="hit") == 0


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "ü" * 1000, "", "\udc80", '"} 1\nkvframework_up 7'])
def test_names_from_clients_break_no_line(name: str) -> None:
    observed = answered(document(lookups__by_model={name: {"asked_tokens": 5, "l1_tokens": 0, "l2_tokens": 0}}))
    shown = name[:128].encode("utf-8", "replace").decode()
    assert value(observed, "lookup_tokens_total", model=shown, found="missed") == 5
    assert value(observed, "up") == 1


def test_names_that_are_equal_after_the_bound_are_one_series() -> None:
    rows = {f"{'m' * 200}{number}": {"asked_tokens": 5} for number in range(3)}
    assert (
        value(answered(document(lookups__by_model=rows)), "lookup_tokens_total", model="m" * 128, found="missed") == 15
    )


def test_no_label_names_a_secret_or_a_request() -> None:
    labels = {label for metric in METRICS for label in metric.labels}
    assert not labels & {"salt", "cache_salt", "prompt", "digest", "key", "request_id", "session", "pid", "namespace"}
    assert all(re.fullmatch("[a-z_]+", label) for label in labels)


@pytest.mark.parametrize("older", [{}, {"server": {"started_at": "2026-01-01T00:00:00+00:00"}, "l2": []}])
def test_a_document_of_another_release_is_no_error(older: dict[str, Any]) -> None:
    older.setdefault("server", {"started_at": "2026-01-01T00:00:00+00:00"})
    assert value(answered(older), "lookups_total") == 0
