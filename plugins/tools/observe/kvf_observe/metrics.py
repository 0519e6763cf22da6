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
    "asked_tokens_total": ("asked_tokens", "counter", "tokens of lookups"),
    "hit_tokens_total": ("hit_tokens", "counter", "tokens that lookups found"),
    "stored_objects_total": ("stored_objects", "counter", "objects stored"),
    "evicted_objects_total": ("evicted_objects", "counter", "objects evicted from L1"),
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
        made.append(Metric(f"{kind}_{name}", type_, f"{words}, by {kind}", place, rows(f"use.{kind}s", field), (kind,)))
    return tuple(made)


# What `observe` itself knows, in the document that `own_document` makes. These series exist without a server, too.
OWN = (
    _gauge("up", "whether the server answered the last poll", "", number("up"), row="server-silent"),
    _gauge(
        "problem", "present problems, by the check of /readyz", "", counts("problems"), ("where",), "what-do-you-see"
    ),
    _gauge("round_trip_seconds", "time of the last poll's way through the serving loop", "", number("round_trip_s")),
    _counter("polls_total", "polls of the server, by outcome", "", counts("polls"), ("outcome",)),
    _counter(
        "traced_requests_total",
        "sampled requests whose spans were exported, failed to be, or that the server forgot before",
        "",
        counts("traced"),
        ("outcome",),
    ),
)

# The titles are rows of the dashboard.
TABLE: dict[str, tuple[Metric, ...]] = {
    "Server": (
        _gauge("build_info", "1, with the server's release", "server.version", derived.build, ("version",)),
        _gauge(
            "server_start_time_seconds",
            "start of the server, in seconds since 1970",
            "server.started_at",
            derived.started,
            row="server-killed",
        ),
        _gauge("instances", "registered instances of engines", "instances[].instance_id", derived.length("instances")),
        _gauge(
            "sessions", "connected clients", "messaging.sessions[].session_id", derived.length("messaging.sessions")
        ),
        _counted("clients_total", "clients that connected, and that ended", ("what",)),
        _counted("client_lost_total", "calls that failed at clients", ("what",), "server-silent"),
        _counted("client_lost_bytes_total", "bytes of the loads and stores that failed at clients"),
        _gauge("log_waiting_lines", "lines of the log that are not written yet", "log.waiting"),
        _counted("log_dropped_total", "lines of the log that were never written", row="log-not-written"),
    ),
    "Lookups": (
        _counter("lookups_total", "lookups", "lookups.lookups"),
        _counter(
            "lookup_tokens_total",
            "tokens of lookups, by where they were found",
            "lookups.by_model.*.asked_tokens, lookups.by_model.*.l1_tokens, lookups.by_model.*.l2_tokens",
            derived.found_tokens,
            ("model", "found"),
        ),
        _counter(
            "misses_total",
            "lookups that missed a chunk, by why the first missing one was missing",
            "lookups.misses.*",
            counts("lookups.misses", REASONS),
            ("reason",),
        ),
        _counter(
            "lookups_unknown_namespace_total",
            "lookups of a namespace that no instance has registered",
            "lookups.unknown_namespace",
            row="namespace-unknown",
        ),
        _counter(
            "prefill_saved_seconds_total",
            "seconds in which engines would have computed what lookups found, at the speed that they report",
            "lookups.prefill_saved_s",
        ),
        _counter("lookups_priced_total", "lookups whose loads were priced", "price.lookups"),
        _counter(
            "lookups_cut_total", "those that load less than the tiers have, as the rest is computed sooner", "price.cut"
        ),
        _counter("lookup_cut_tokens_total", "tokens that are computed in place of a load", "price.cut_tokens"),
        _counter(
            "lookup_saved_seconds_total", "seconds that requests wait less for it, by the prices", "price.saved_s"
        ),
        _gauge("tickets", "lookups whose pins have not ended", "tickets"),
    ),
    "Requests": (
        _histogram(
            "request_seconds",
            "time from the receipt of a request to its answer",
            "requests.*.counts",
            counts("requests"),
            ("type",),
        ),
        _counted("messages_total", "messages", ("what",)),
        _counter(
            "refused_total",
            "requests that were answered with an error, by its code",
            "messaging.counters.errors.CODE",
            derived.error_answers,
            ("code",),
            "malformed",
        ),
        _counted("messaging_trouble_total", "what messages, clients and the loop met", ("what",), "malformed"),
        _gauge("descriptors_in_use", "open descriptors", "messaging.descriptors.in_use", row="descriptors-low"),
        _gauge("descriptors_limit", "the limit of descriptors", "messaging.descriptors.limit", row="descriptors-low"),
        _gauge(
            "accepting",
            "whether new clients are accepted",
            "messaging.descriptors.local, messaging.descriptors.readers, messaging.descriptors.sessions",
            derived.accepting,
            ("what",),
            "descriptors-low",
        ),
    ),
    "L1": (
        _gauge("l1_capacity_bytes", "size of the arena", "l1.capacity_bytes"),
        _gauge("l1_ready_bytes", "how much of the arena is resident", "l1.ready_bytes", row="arena-not-resident"),
        _gauge(
            "l1_bytes",
            "bytes of the resident arena, by state",
            "l1.used_bytes, l1.free_bytes, l1.quarantined_bytes",
            derived.l1_bytes,
            ("state",),
            "writer-stopped",
        ),
        _gauge("l1_largest_free_bytes", "the largest free range", "l1.largest_free_bytes"),
        _gauge("l1_objects", "objects", "l1.objects"),
        _gauge("l1_pins", "pins on objects", "l1.pins"),
        _gauge("l1_journal_bytes", "memory of the journal of what L1 holds", "l1.journal_bytes"),
        _gauge("l1_recovered_objects", "objects of an earlier server that L1 began with", "l1.recovered.objects"),
        _gauge("l1_recovered_bytes", "their bytes", "l1.recovered.bytes"),
        _gauge("l1_recovered_seconds", "how long their recovery took", "l1.recovered.seconds"),
        _gauge(
            "l1_cold_start",
            "1 for the reason why L1 began empty",
            "l1.recovered.why_cold",
            first_word("l1.recovered.why_cold", COLD_REASONS),
            ("reason",),
        ),
        _gauge(
            "l1_leases",
            "reservations, and groups of pins",
            "l1.write_leases, l1.pin_leases",
            each({"write": "l1.write_leases", "pin": "l1.pin_leases"}),
            ("kind",),
        ),
        _counted(
            "l1_object_events_total",
            "objects stored by engines, loaded from L2, aborted by their writer, and dropped for want of room",
            ("what",),
            "l1-full-of-pins",
        ),
        _counted("l1_evictions_total", "evicted objects, by cause", ("cause",), "l1-full"),
        _histogram(
            "l1_evicted_idle_seconds",
            "how long evicted objects had not been used",
            "l1.evicted_idle_s.counts",
            histogram("l1.evicted_idle_s"),
        ),
        _histogram(
            "l1_wanted_after_eviction_seconds",
            "how long after its eviction an object was asked for",
            "l1.wanted_after_eviction_s.counts",
            histogram("l1.wanted_after_eviction_s"),
        ),
        _gauge(
            "l1_hit_rate_by_capacity",
            "the share of tokens that L1 would have had with this capacity",
            "l1.more_capacity[].hit_rate",
            derived.capacities,
            ("capacity_bytes",),
        ),
        _gauge("l1_ghosts", "digests that left L1 and are remembered", "l1.ghosts.held"),
        _gauge("l1_ghosts_bytes", "memory of these", "l1.ghosts.bytes"),
        _counted("retrieves_total", "RETRIEVEs"),
        _counted("retrieve_misses_total", "RETRIEVEs that found something missing"),
        _counted("stores_quarantined_total", "stores that outlived their lease", row="writer-stopped"),
        _counted("pins_lapsed_total", "pins that outlived their lease", row="reader-slow"),
        _counted("pins_over_share_total", "leases that ended early or were refused by `pin_share`", row="share-pinned"),
    ),
    "Tiers": (
        _gauge("tier_up", "whether both circuits are closed", "l2[].state", derived.tier_up, ("tier",), "tier-down"),
        _gauge(
            "tier_problem",
            "1 for each problem that a tier reports, such as a full disk: the place, and the store's words",
            "l2[].problems",
            derived.tier_problems,
            ("tier", "problem"),
            "tier-full",
        ),
        _gauge(
            "tier_circuit_open",
            "whether calls of this direction are stopped",
            "l2[].circuits.read, l2[].circuits.write",
            derived.circuits,
            ("tier", "direction"),
            "tier-down",
        ),
        _histogram(
            "tier_seconds", "time of calls that worked", "l2[].seconds.*.counts", tier_counts("seconds"), ("tier", "op")
        ),
        _counted("tier_bytes_total", "bytes of values", ("tier", "direction")),
        _counted("tier_values_total", "values, by what became of them", ("tier", "what"), "tier-values-unusable"),
        _counted(
            "tier_calls_failed_total",
            "calls that failed; those of them that met a bug of the plugin; calls not made, as the tier is down",
            ("tier", "why"),
            "tier-down",
        ),
        _counted(
            "tier_never_written_total",
            "objects that were never written: the queue was full, they left L1 first, the tier did not accept them",
            ("tier", "why"),
            "tier-slow",
        ),
        _tier_gauge("load_bytes_per_second", "speed of loads, as learned; 0 while it is not known", "load_bytes_per_s"),
        _tier_gauge("load_call_seconds", "what each call of a load takes beside that", "load_call_s"),
        _tier_gauge("load_queued_bytes", "bytes that wait to be loaded", "load_queued_bytes"),
        _tier_gauge("write_pending", "objects still to be written", "write_pending", "tier-slow"),
        _tier_gauge("pending_calls", "calls under way", "pending_calls"),
        _tier_gauge("oldest_call_seconds", "age of the oldest call under way", "oldest_call_s", "tier-slow"),
        _tier_gauge("overdue_seconds", "how far a call is beyond its deadline", "overdue_s", "tier-slow"),
        _tier_gauge("used_bytes", "bytes in the tier, where it knows them", "usage.used_bytes"),
        _tier_gauge("capacity_bytes", "capacity of the tier, where it knows it", "usage.capacity_bytes"),
        _gauge(
            "tier_node_up",
            "whether a node whose values a tier loads answers",
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
                ("values", "values", "values that came from another node"),
                ("bytes", "nbytes", "their bytes"),
                ("failures", "failed", "questions and loads that another node did not answer"),
            )
        ),
        _counter(
            "tier_lent_values_total",
            "values of L1 that went to other nodes",
            "l2[].details.lending.values",
            tier("details.lending.values"),
            ("tier",),
        ),
        _counter(
            "tier_lent_bytes_total",
            "their bytes",
            "l2[].details.lending.nbytes",
            tier("details.lending.nbytes"),
            ("tier",),
        ),
        _counter(
            "tier_lending_refused_total",
            "what was not lent: values for want of room, connections beyond the bounds, strangers",
            "l2[].details.lending.refused.busy, l2[].details.lending.refused.full, "
            "l2[].details.lending.refused.strangers",
            tier_counts("details.lending.refused"),
            ("tier", "why"),
            "peers-apart",
        ),
        _counter(
            "tier_own_total",
            "what the plugin of a tier counts itself",
            "l2[].details.counters.*.value",
            derived.tier_own,
            ("tier", "what"),
        ),
        _gauge("prefetch_in_flight", "loads from tiers under way", "prefetch.in_flight"),
        _counted("prefetch_refused_total", "loads not begun, as too many were under way", row="loads-refused"),
    ),
    "Devices": (
        _gauge(
            "copier_up",
            "whether the device's copier runs",
            "transports.*.devices[].pid",
            derived.devices("pid"),
            ("transport", "device"),
            "copier-ended",
        ),
        _counter(
            "copier_starts_total",
            "starts of the device's copier",
            "transports.*.devices[].starts",
            derived.devices("starts"),
            ("transport", "device"),
            "copier-ended",
        ),
        _gauge(
            "copies",
            "copies under way",
            "transports.*.devices[].copies",
            derived.devices("copies"),
            ("transport", "device"),
        ),
        _counter(
            "transport_own_total",
            "what the plugin of a transport counts itself",
            "transports.*.counters.*.value",
            derived.transport_own,
            ("transport", "what"),
        ),
    ),
    "Events": (
        _gauge(
            "events_blocks",
            "blocks that are announced to routers, by medium",
            "events.blocks.CPU, events.blocks.STORAGE",
            each({medium: f"events.blocks.{medium}" for medium in ("CPU", "STORAGE")}),
            ("medium",),
        ),
        _counted(
            "events_total",
            "batches sent to routers, answers with what one lacked, subscriptions, and what was refused",
            ("what",),
        ),
        _counted(
            "events_dropped_total",
            "what the server was too busy to note for routers, and has looked up since",
            row="events-dropped",
        ),
        _counted(
            "events_withheld_total",
            "contents that are not announced: not what their digests name, or of no form for routers",
            ("why",),
            "events-mismatched",
        ),
        _gauge("events_waiting", "what is not announced yet", "events.waiting"),
        _gauge("events_next_number", "number of the next batch", "events.next_number"),
        _gauge("events_ledger_bytes", "size of the ledger of what was announced", "events.ledger_bytes"),
    ),
    "Who uses it": (*_use("model"), *_use("tenant")),
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
