"""The table of metrics. The exposition, docs/reference/metrics.md, the dashboard, the alerts and the tests follow it.

Names are promises. Labels have few values: what a server configures, a fixed list, or names whose number the server
bounds; never a salt, a prompt, a digest, a key or the id of a request. Each series exists from the start, at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import methodcaller
from typing import Any

from kvf_observe import readings as derived
from kvf_observe.health import findings
from kvf_observe.http.exposition import Labels, Metric, Reader, Type
from kvf_observe.poller import Observed
from kvf_observe.readings import (
    counts,
    each,
    first_word,
    histogram,
    number,
    rows,
    tier,
    tier_counts,
    tier_each,
    tier_rows,
)
from kvframework.status import COLD_REASONS, COUNTERS, REASONS

# Sampled requests by what became of their spans.
NOTHING_TRACED = {"exported": 0, "failed": 0, "forgotten": 0}
USE: dict[str, tuple[str, Type, str]] = {
    "bytes": ("bytes", "gauge", "bytes in L1"),
    "objects": ("objects", "gauge", "objects in L1"),
    "asked_tokens_total": ("asked_tokens", "counter", "tokens in lookups"),
    "hit_tokens_total": ("hit_tokens", "counter", "tokens found by lookups"),
    "stored_objects_total": ("stored_objects", "counter", "objects stored in L1"),
    "evicted_objects_total": ("evicted_objects", "counter", "objects evicted from L1"),
    "prefill_saved_seconds_total": ("prefill_saved_s", "counter", "estimated prefill time saved"),
    "limited_requests_total": ("limited", "counter", "misses from load_bandwidth"),
}


def _counter(
    name: str, help_: str, place: str, read: Reader | None = None, labels: Labels = (), row: str = ""
) -> Metric:
    return Metric(name, "counter", help_, place, read or number(place), labels, row)


def _gauge(name: str, help_: str, place: str, read: Reader | None = None, labels: Labels = (), row: str = "") -> Metric:
    return Metric(name, "gauge", help_, place, read or number(place), labels, row)


def _histogram(name: str, help_: str, place: str, read: Reader, labels: Labels = ()) -> Metric:
    return Metric(name, "histogram", help_, place, read, labels)


def _counted(name: str, help_: str, labels: Labels = (), row: str = "") -> Metric:
    """The counters of the server that are declared for this family."""
    declared = {place: each.label for place, each in COUNTERS.items() if each.metric == name}
    places = {label or place.rpartition(".")[2]: place for place, label in declared.items()}
    if labels[:1] == ("tier",):
        read = tier_each({label: place.removeprefix("l2[].") for label, place in places.items()})
    else:
        read = each(places) if labels else number(*places.values())
    return _counter(name, help_, ", ".join(places.values()), read, labels, row)


def _tier_gauge(name: str, help_: str, field: str, row: str = "") -> Metric:
    return _gauge(f"tier_{name}", help_, f"l2[].{field}", tier(field), ("tier",), row)


def _use(kind: str) -> tuple[Metric, ...]:
    made = []
    for name, (field, type_, words) in USE.items():
        place = f"use.{kind}s.*.{field}"
        made.append(Metric(f"{kind}_{name}", type_, f"{words} by {kind}", place, rows(f"use.{kind}s", field), (kind,)))
    return tuple(made)


# What `observe` itself knows, in the document that `own_document` makes. These series exist without a server, too.
OWN = (
    _gauge("up", "whether the server answered the last poll, 1 or 0", "", number("up"), row="server-silent"),
    _gauge("problem", "current problems by check of /readyz", "", counts("problems"), ("where",), "what-do-you-see"),
    _gauge("round_trip_seconds", "round trip of the last poll through the serving loop", "", number("round_trip_s")),
    _counter("polls_total", "polls of the server by outcome", "", counts("polls"), ("outcome",)),
    _counter(
        "traced_requests_total",
        "requests sampled for traces, by outcome of the export",
        "",
        counts("traced"),
        ("outcome",),
    ),
)

# The titles are rows of the dashboard.
TABLE: dict[str, tuple[Metric, ...]] = {
    "Server": (
        _gauge("build_info", "release of the server; the value is 1", "server.version", derived.build, ("version",)),
        _gauge(
            "server_start_time_seconds",
            "server start, in seconds since 1970",
            "server.started_at",
            derived.started,
            row="server-killed",
        ),
        _gauge("instances", "registered engine instances", "instances[].instance_id", derived.length("instances")),
        _gauge(
            "sessions", "connected clients", "messaging.sessions[].session_id", derived.length("messaging.sessions")
        ),
        _counted("clients_total", "client connections begun and ended", ("what",)),
        _counted("client_lost_total", "client calls to the server that failed", ("what",), "server-silent"),
        _counted("client_lost_bytes_total", "bytes of client loads and stores that failed"),
        _gauge("log_waiting_lines", "lines of the server's log that wait to be written", "log.waiting"),
        _counted("log_dropped_total", "lines of the server's log that were lost", row="log-not-written"),
    ),
    "Lookups": (
        _counter("lookups_total", "lookups", "lookups.lookups"),
        _counter(
            "lookup_tokens_total",
            "tokens of lookups by the place where they were found",
            "lookups.by_model.*.asked_tokens, lookups.by_model.*.l1_tokens, lookups.by_model.*.l2_tokens",
            derived.found_tokens,
            ("model", "found"),
        ),
        _counter(
            "misses_total",
            "lookups that missed a chunk, by reason of the first miss",
            "lookups.misses.*",
            counts("lookups.misses", REASONS),
            ("reason",),
        ),
        _counter(
            "lookups_unknown_namespace_total",
            "lookups of an unregistered namespace",
            "lookups.unknown_namespace",
            row="namespace-unknown",
        ),
        _counter(
            "prefill_saved_seconds_total",
            "estimated prefill time saved, by the speed that engines report",
            "lookups.prefill_saved_s",
        ),
        _counter("lookups_priced_total", "lookups for which loading and computing were compared", "price.lookups"),
        _counter("lookups_cut_total", "lookups whose load was cut because computing is faster", "price.cut"),
        _counter("lookup_cut_tokens_total", "tokens computed because loading is slower", "price.cut_tokens"),
        _counter(
            "lookup_saved_seconds_total",
            "estimated waiting time saved by computing instead of loading",
            "price.saved_s",
        ),
        _gauge("tickets", "open lookup tickets", "tickets"),
    ),
    "Requests": (
        _histogram(
            "request_seconds",
            "latency of requests from receipt to reply",
            "requests.*.counts",
            counts("requests"),
            ("type",),
        ),
        _counted("messages_total", "messages that the server received and sent", ("what",)),
        _counter(
            "refused_total",
            "error replies of the server by error code",
            "messaging.counters.errors.CODE",
            derived.error_answers,
            ("code",),
            "malformed",
        ),
        _counted("messaging_trouble_total", "messaging problems of the server by kind", ("what",), "malformed"),
        _gauge(
            "descriptors_in_use",
            "open descriptors of the server",
            "messaging.descriptors.in_use",
            row="descriptors-low",
        ),
        _gauge(
            "descriptors_limit", "descriptor limit of the server", "messaging.descriptors.limit", row="descriptors-low"
        ),
        _gauge(
            "accepting",
            "whether the server accepts new clients, 1 or 0",
            "messaging.descriptors.local, messaging.descriptors.readers, messaging.descriptors.sessions",
            derived.accepting,
            ("what",),
            "descriptors-low",
        ),
    ),
    "L1": (
        _gauge("l1_capacity_bytes", "capacity of L1", "l1.capacity_bytes"),
        _gauge("l1_ready_bytes", "bytes of L1 in physical memory", "l1.ready_bytes", row="arena-not-resident"),
        _gauge(
            "l1_bytes",
            "bytes of L1 by state",
            "l1.used_bytes, l1.free_bytes, l1.quarantined_bytes",
            derived.l1_bytes,
            ("state",),
            "writer-stopped",
        ),
        _gauge("l1_largest_free_bytes", "largest free range of L1", "l1.largest_free_bytes"),
        _gauge("l1_objects", "objects in L1", "l1.objects"),
        _gauge("l1_pins", "pins on L1 objects", "l1.pins"),
        _gauge("l1_journal_bytes", "memory of the journal of L1", "l1.journal_bytes"),
        _gauge("l1_recovered_objects", "L1 objects recovered from the previous server", "l1.recovered.objects"),
        _gauge("l1_recovered_bytes", "L1 bytes recovered from the previous server", "l1.recovered.bytes"),
        _gauge("l1_recovered_seconds", "duration of the recovery of L1", "l1.recovered.seconds"),
        _gauge(
            "l1_cold_start",
            "reason why L1 began empty; the value is 1",
            "l1.recovered.why_cold",
            first_word("l1.recovered.why_cold", COLD_REASONS),
            ("reason",),
        ),
        _gauge(
            "l1_leases",
            "leases on L1 objects by kind",
            "l1.write_leases, l1.pin_leases",
            each({"write": "l1.write_leases", "pin": "l1.pin_leases"}),
            ("kind",),
        ),
        _counted(
            "l1_object_events_total", "L1 objects stored, loaded, aborted or dropped", ("what",), "l1-full-of-pins"
        ),
        _counted("l1_evictions_total", "evictions from L1 by cause", ("cause",), "l1-full"),
        _counted("l1_prefetched_bytes_total", "bytes loaded ahead of requests, used or left unused", ("what",)),
        _histogram(
            "l1_evicted_idle_seconds",
            "idle time of objects evicted from L1",
            "l1.evicted_idle_s.counts",
            histogram("l1.evicted_idle_s"),
        ),
        _histogram(
            "l1_wanted_after_eviction_seconds",
            "time from an eviction from L1 to the next request for the object",
            "l1.wanted_after_eviction_s.counts",
            histogram("l1.wanted_after_eviction_s"),
        ),
        _gauge(
            "l1_hit_rate_by_capacity",
            "estimated hit rate of L1 at other capacities (LRU)",
            "l1.more_capacity[].hit_rate",
            derived.capacities,
            ("capacity_bytes",),
        ),
        _gauge("l1_ghosts", "remembered digests of objects evicted from L1", "l1.ghosts.held"),
        _gauge("l1_ghosts_bytes", "memory of the remembered digests of evicted objects", "l1.ghosts.bytes"),
        _counted("retrieves_total", "RETRIEVE requests"),
        _counted("retrieve_misses_total", "RETRIEVE requests with a missing object"),
        _counted("stores_quarantined_total", "stores whose write lease expired", row="writer-stopped"),
        _counted("pins_lapsed_total", "pins on L1 objects whose lease expired", row="reader-slow"),
        _counted("pins_over_share_total", "pin leases shortened or refused by pin_share", row="share-pinned"),
    ),
    "Tiers": (
        _gauge("tier_up", "whether the tier is up, 1 or 0", "l2[].state", derived.tier_up, ("tier",), "tier-down"),
        _gauge(
            "tier_problem",
            "problem that a tier reports, such as a full disk; the value is 1",
            "l2[].problems",
            derived.tier_problems,
            ("tier", "problem"),
            "tier-full",
        ),
        _gauge(
            "tier_circuit_open",
            "whether the server has stopped calls to the tier in this direction, 1 or 0",
            "l2[].circuits.read, l2[].circuits.write",
            derived.circuits,
            ("tier", "direction"),
            "tier-down",
        ),
        _histogram(
            "tier_seconds",
            "duration of successful tier calls",
            "l2[].seconds.*.counts",
            tier_counts("seconds"),
            ("tier", "op"),
        ),
        _counted("tier_bytes_total", "bytes moved to and from a tier", ("tier", "direction")),
        _counted(
            "tier_values_total",
            "values read from or written to a tier by outcome",
            ("tier", "what"),
            "tier-values-unusable",
        ),
        _counted("tier_calls_failed_total", "failed and skipped tier calls by cause", ("tier", "why"), "tier-down"),
        _counted("tier_never_written_total", "objects never written to a tier, by cause", ("tier", "why"), "tier-slow"),
        _tier_gauge("load_bytes_per_second", "measured load speed of a tier, 0 while unknown", "load_bytes_per_s"),
        _tier_gauge("load_call_seconds", "measured overhead per load call of a tier", "load_call_s"),
        _tier_gauge("load_queued_bytes", "bytes queued for loading from a tier", "load_queued_bytes"),
        _tier_gauge("write_pending", "objects queued for writing to a tier", "write_pending", "tier-slow"),
        _tier_gauge("pending_calls", "tier calls in flight", "pending_calls"),
        _tier_gauge("oldest_call_seconds", "age of the oldest tier call in flight", "oldest_call_s", "tier-slow"),
        _tier_gauge("overdue_seconds", "time by which a tier call exceeds its deadline", "overdue_s", "tier-slow"),
        _tier_gauge("used_bytes", "bytes stored in a tier, if it reports them", "usage.used_bytes"),
        _tier_gauge("capacity_bytes", "capacity of a tier, if it reports it", "usage.capacity_bytes"),
        _gauge(
            "tier_node_up",
            "whether the peer node answers, 1 or 0",
            "l2[].details.nodes[].state",
            tier_rows("details.nodes", "node", lambda row: int(row.get("state") == "up")),
            ("tier", "node"),
            "peers-apart",
        ),
        *(
            _counter(
                f"tier_node_{name}_total",
                help_,
                f"l2[].details.nodes[].{field}",
                tier_rows("details.nodes", "node", methodcaller("get", field, 0)),
                ("tier", "node"),
            )
            for name, field, help_ in (
                ("values", "values", "values loaded from a peer node"),
                ("bytes", "nbytes", "bytes loaded from a peer node"),
                ("failures", "failed", "requests that a peer node did not answer"),
            )
        ),
        _counter(
            "tier_lent_values_total",
            "L1 values sent to peer nodes",
            "l2[].details.lending.values",
            tier("details.lending.values"),
            ("tier",),
        ),
        _counter(
            "tier_lent_bytes_total",
            "bytes of L1 values sent to peer nodes",
            "l2[].details.lending.nbytes",
            tier("details.lending.nbytes"),
            ("tier",),
        ),
        _counter(
            "tier_lending_refused_total",
            "refused requests of peer nodes by cause",
            "l2[].details.lending.refused.busy, l2[].details.lending.refused.full, "
            "l2[].details.lending.refused.strangers",
            tier_counts("details.lending.refused"),
            ("tier", "why"),
            "peers-apart",
        ),
        _counter(
            "tier_own_total",
            "counters of a tier plugin",
            "l2[].details.counters.*.value",
            derived.tier_own,
            ("tier", "what"),
        ),
        _gauge("prefetch_in_flight", "loads from tiers in flight", "prefetch.in_flight"),
        _counted("prefetch_refused_total", "loads refused because too many were in flight", row="loads-refused"),
    ),
    "Devices": (
        _gauge(
            "copier_up",
            "whether the copier process of a device runs, 1 or 0",
            "transports.*.devices[].pid",
            derived.devices("pid"),
            ("transport", "device"),
            "copier-ended",
        ),
        _counter(
            "copier_starts_total",
            "starts of a device's copier process",
            "transports.*.devices[].starts",
            derived.devices("starts"),
            ("transport", "device"),
            "copier-ended",
        ),
        _gauge(
            "copies",
            "device copies in flight",
            "transports.*.devices[].copies",
            derived.devices("copies"),
            ("transport", "device"),
        ),
        _counter(
            "transport_own_total",
            "counters of a transport plugin",
            "transports.*.counters.*.value",
            derived.transport_own,
            ("transport", "what"),
        ),
    ),
    "Events": (
        _gauge(
            "events_blocks",
            "blocks announced to routers by medium",
            "events.blocks.CPU, events.blocks.STORAGE",
            each({medium: f"events.blocks.{medium}" for medium in ("CPU", "STORAGE")}),
            ("medium",),
        ),
        _counted("events_total", "messages exchanged with routers by kind", ("what",)),
        _counted("events_dropped_total", "changes of L1 that were not sent to routers", row="events-dropped"),
        _counted("events_withheld_total", "objects withheld from routers by cause", ("why",), "events-mismatched"),
        _gauge("events_waiting", "event records that wait to be announced to routers", "events.waiting"),
        _gauge("events_next_number", "number of the next event batch", "events.next_number"),
        _gauge("events_ledger_bytes", "size of the event ledger", "events.ledger_bytes"),
    ),
    "Use by model and tenant": (*_use("model"), *_use("tenant")),
}

METRICS: tuple[Metric, ...] = (*OWN, *(metric for metrics in TABLE.values() for metric in metrics))


def own_document(observed: Observed, now: float, traced: Mapping[str, int] = NOTHING_TRACED) -> dict[str, Any]:
    """What `observe` itself knows, for the readers of `OWN`."""
    return {
        "up": int(observed.document is not None),
        "round_trip_s": observed.round_trip_s,
        "polls": {"answered": observed.polls - observed.failures, "failed": observed.failures},
        "problems": {finding.name: len(finding.facts) for finding in findings(observed, now)},
        "traced": dict(traced),
    }
