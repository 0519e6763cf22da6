"""The alerts, each with the row of docs/operations.md that says what to do; the series that the dashboard of a fleet
reads, recorded in advance; and the file of rules for Prometheus and for its operator. `python -m tests.docs.generate`
writes it. Pure."""

from __future__ import annotations

import json
from typing import Literal, NamedTuple

Severity = Literal["page", "ticket", "look"]


class Alert(NamedTuple):
    """A rule: it fires when `expr` has had a result for `lasting`. `page` wants a person now, `ticket` today, `look` at
    the next occasion; `row` is an anchor of docs/operations.md."""

    name: str
    severity: Severity
    lasting: str
    row: str
    summary: str
    expr: str


def _problem(where: str) -> str:
    return f'kvframework_problem{{where="{where}"}} > 0'


def _grows(name: str, matchers: str = "", span: str = "10m") -> str:
    return f"increase(kvframework_{name}{matchers}[{span}]) > 0"


_FOUND = 'sum without (model, found) (rate(kvframework_lookup_tokens_total{{found=~"l1|l2"}}[{span}]{offset}))'
_ASKED = "sum without (model, found) (rate(kvframework_lookup_tokens_total[{span}]{offset}))"
_RATE = f"({_FOUND} / {_ASKED})"
_RATE_NOW = _RATE.format(span="30m", offset="")
_RATE_BEFORE = _RATE.format(span="1d", offset=" offset 1h")

ALERTS = (
    Alert(
        "KvframeworkDown",
        "page",
        "1m",
        "server-silent",
        "the kvframework server does not answer: every lookup of this node is a miss",
        "kvframework_up == 0",
    ),
    # An observe that the server keeps running ends with it, and says nothing then.
    Alert(
        "KvframeworkNotScraped",
        "page",
        "1m",
        "server-absent",
        "kvframework observe does not answer, so metrics are missing; the server may be down too",
        'up{job=~"kvframework.*"} == 0',
    ),
    Alert(
        "KvframeworkRestarts",
        "page",
        "0m",
        "server-killed",
        "the kvframework server started more than twice within an hour",
        "changes(kvframework_server_start_time_seconds[1h]) > 2",
    ),
    Alert(
        "KvframeworkArenaNotResident",
        "ticket",
        "10m",
        "arena-not-resident",
        "part of the server's L1 is not in physical memory",
        _problem("l1"),
    ),
    Alert(
        "KvframeworkDescriptorsLow",
        "ticket",
        "2m",
        "descriptors-low",
        "the server is short of file descriptors and accepts no new {{ $labels.what }} connections",
        "kvframework_accepting == 0",
    ),
    Alert(
        "KvframeworkTierDown",
        "ticket",
        "10m",
        "tier-down",
        "the server's L2 tier {{ $labels.tier }} is down",
        "kvframework_tier_up == 0",
    ),
    Alert(
        "KvframeworkTierHangs",
        "ticket",
        "5m",
        "tier-slow",
        "a call to the L2 tier {{ $labels.tier }} is more than 5 s past its deadline",
        "kvframework_tier_overdue_seconds > 5",
    ),
    Alert(
        "KvframeworkInstanceLost",
        "ticket",
        "5m",
        "copier-ended",
        "an engine instance was lost and has not registered again",
        _problem("instances"),
    ),
    Alert(
        "KvframeworkClientRefused",
        "ticket",
        "5m",
        "client-refused",
        "the server refuses a client, or a client refuses the server",
        _problem("messaging.refused"),
    ),
    Alert(
        "KvframeworkClientsLose",
        "ticket",
        "5m",
        "server-silent",
        "client calls to the server fail",
        _problem("losses"),
    ),
    Alert("KvframeworkLogNotWritten", "ticket", "5m", "log-not-written", "writing the log fails", _problem("log")),
    Alert(
        "KvframeworkObserveEnds",
        "ticket",
        "0m",
        "observe-ended",
        "the server's process `kvframework observe` ended and was started again",
        f"max_over_time({_problem('observe').removesuffix(' > 0')}[10m]) > 0",
    ),
    Alert(
        "KvframeworkHandlerFails",
        "ticket",
        "0m",
        "handler-raised",
        "requests fail because of an error in the server or a plugin",
        _grows("refused_total", '{code="run.handler"}')
        + " or "
        + _grows("messaging_trouble_total", '{what=~"loop_errors|tick_errors"}'),
    ),
    Alert(
        "KvframeworkTierBug",
        "ticket",
        "0m",
        "tier-bug",
        "the plugin of the L2 tier {{ $labels.tier }} raised an unexpected error",
        _grows("tier_calls_failed_total", '{why="bug"}'),
    ),
    Alert(
        "KvframeworkTierFull",
        "ticket",
        "10m",
        "tier-full",
        "the L2 tier {{ $labels.tier }} does not accept values",
        _grows("tier_values_total", '{what="store_failed"}'),
    ),
    Alert(
        "KvframeworkStoresDropped",
        "look",
        "10m",
        "l1-full-of-pins",
        "the server drops stores because L1 has no room",
        _grows("l1_object_events_total", '{what="dropped"}'),
    ),
    Alert(
        "KvframeworkNeverWritten",
        "look",
        "10m",
        "tier-slow",
        "the server drops objects before they are written to the L2 tier {{ $labels.tier }}",
        _grows("tier_never_written_total"),
    ),
    Alert(
        "KvframeworkValuesDamaged",
        "look",
        "0m",
        "tier-values-unusable",
        "the server found damaged values in the L2 tier {{ $labels.tier }}",
        _grows("tier_values_total", '{what="corrupt"}', "1h"),
    ),
    Alert(
        "KvframeworkLoadsRefused",
        "look",
        "10m",
        "loads-refused",
        "the server refuses loads from tiers because too many are in flight",
        _grows("prefetch_refused_total"),
    ),
    Alert(
        "KvframeworkQuarantine",
        "look",
        "10m",
        "writer-stopped",
        "L1 memory is quarantined because a client missed the deadline of a store",
        'kvframework_l1_bytes{state="quarantined"} > 0',
    ),
    Alert(
        "KvframeworkPinsLapse",
        "look",
        "10m",
        "reader-slow",
        "engines copy more slowly than retrieve_lease_s",
        _grows("pins_lapsed_total"),
    ),
    Alert(
        "KvframeworkCopierRestarts",
        "look",
        "0m",
        "copier-ended",
        "the server restarted the copier process of a device",
        "increase(kvframework_copier_starts_total[1h]) > 1",
    ),
    Alert(
        "KvframeworkUnknownNamespace",
        "look",
        "10m",
        "namespace-unknown",
        "engines look up namespaces that no instance has registered",
        _grows("lookups_unknown_namespace_total"),
    ),
    Alert(
        "KvframeworkStrangers",
        "look",
        "10m",
        "wrong-key",
        "the server refuses clients with unknown CURVE keys or of other users",
        _grows("messaging_trouble_total", '{what=~"curve_refused|liveness_refused"}'),
    ),
    Alert(
        "KvframeworkHitRateFalls",
        "look",
        "30m",
        "the-hit-rate-is-low-or-0",
        "the hit rate is less than half that of the day before",
        f"{_RATE_NOW} < 0.5 * {_RATE_BEFORE}",
    ),
)


# The name of each recorded series, the labels that it keeps beside `cluster`, and the counter whose rate it is. Those
# of histograms are sums over the nodes: 300 nodes would have some hundred thousand.
RECORDS = {
    "instance:kvframework_lookup_tokens:rate5m": ("instance, model, found", "lookup_tokens_total"),
    "instance:kvframework_prefill_saved_seconds:rate5m": ("instance", "prefill_saved_seconds_total"),
    "instance:kvframework_l1_evictions:rate5m": ("instance", "l1_evictions_total"),
    "instance_model:kvframework_prefill_saved_seconds:rate5m": ("instance, model", "model_prefill_saved_seconds_total"),
    "instance_tenant:kvframework_prefill_saved_seconds:rate5m": (
        "instance, tenant",
        "tenant_prefill_saved_seconds_total",
    ),
    "instance_model:kvframework_hit_tokens:rate5m": ("instance, model", "model_hit_tokens_total"),
    "instance_tenant:kvframework_hit_tokens:rate5m": ("instance, tenant", "tenant_hit_tokens_total"),
    "type:kvframework_request_seconds_bucket:rate5m": (
        "type, le",
        'request_seconds_bucket{type=~"LOOKUP|PREPARE_RETRIEVE|RETRIEVE"}',
    ),
    "cluster:kvframework_l1_evicted_idle_seconds_bucket:rate5m": ("le", "l1_evicted_idle_seconds_bucket"),
    "tier:kvframework_tier_load_seconds_bucket:rate5m": ("tier, le", 'tier_seconds_bucket{op="get_into"}'),
}

_NOTE = "# Made from deploy/prometheus/alerts.py; renew with python -m tests.docs.generate\n"


def prometheus(documentation: str) -> str:
    """The rule file, in YAML; `documentation` is the URL of the folder of the docs."""
    return _NOTE + "".join(_rules(documentation))


def _rules(documentation: str) -> list[str]:
    """The lines of the file."""
    lines = ["groups:", "  - name: kvframework", "    rules:"]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expr)}",
            f"        for: {alert.lasting}",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          runbook_url: {documentation}/operations.md#{alert.row}",
        ]
    lines += ["  - name: kvframework-records", "    rules:"]
    for name, (labels, counter) in RECORDS.items():
        expr = f"sum by (cluster, {labels}) (rate(kvframework_{counter}[5m]))"
        lines += [f"      - record: {name}", f"        expr: {json.dumps(expr)}"]
    return [f"{line}\n" for line in lines]
