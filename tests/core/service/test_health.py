"""What of a status document is trouble."""

from __future__ import annotations

from typing import Any

import pytest

from kvframework import status
from kvframework.api.counter import Counter, Counts
from kvframework.service.health import EVERY_S, CounterReport, problems
from kvframework.status import COUNTERS


def document(**parts: Any) -> dict[str, Any]:
    return {
        "l1": {"ready_bytes": 4 << 20, "capacity_bytes": 4 << 20, "counters": {"stored": 7, "dropped": 0}},
        "l2": [],
        "instances": [{"instance_id": 3, "lost": None}],
        "prefetch": {"refused": 0},
        "messaging": {"counters": {"requests": 9, "malformed": 0}, "refused": []},
        **parts,
    }


def tier(**fields: Any) -> dict[str, Any]:
    return {
        "name": "redis",
        "state": "closed",
        "state_s": 3.0,
        "circuits": {"read": "closed", "write": "closed"},
        "last_error": "",
        "overdue_call": "",
        "overdue_s": 0.0,
        "hits": 5,
        "corrupt": 0,
        **fields,
    }


def trouble(found: dict[str, Any]) -> dict[str, int]:
    return {place: amount for place, _, amount in status.trouble(found)}


def test_all_is_well() -> None:
    assert problems(document(l2=[tier()])) == []
    assert trouble(document(l2=[tier()])) == {}


def test_a_tier_whose_circuit_is_not_closed() -> None:
    circuits = {"read": "closed", "write": "open"}
    down = tier(state="open", state_s=12.34, circuits=circuits, last_error="no route to host\n  hint: find one")
    assert problems(document(l2=[tier(), down])) == [
        {"where": "l2.1", "fact": "redis is down for writes for 12 s: no route to host; hint: find one"}
    ]
    both = tier(state="half-open", circuits={"read": "half-open", "write": "open"})
    (problem,) = problems(document(l2=[both]))
    assert problem["where"] == "l2.0"
    assert "down for reads and writes" in problem["fact"]


def test_a_tier_whose_call_does_not_end() -> None:
    assert problems(document(l2=[tier(overdue_call="put", overdue_s=0.3)])) == [], "a little late"
    hung = tier(overdue_call="put", overdue_s=33.1)
    assert problems(document(l2=[tier(), hung])) == [
        {"where": "l2.1", "fact": "a put to redis still runs 33 s after its deadline"}
    ]


def test_memory_that_is_not_there() -> None:
    (problem,) = problems(document(l1={"ready_bytes": 1 << 20, "capacity_bytes": 4 << 20, "counters": {}}))
    assert problem == {"where": "l1", "fact": "1.0 MiB of 4.0 MiB of L1 are in memory so far"}


def lost(**fields: Any) -> dict[str, Any]:
    recent = {
        "client": "vllm worker 0",
        "pid": 12,
        "lookups": 0,
        "loads": 2,
        "stores": 1,
        "bytes": 3 << 20,
        "codes": {"run.deadline": 3},
        "ago_s": 4.2,
        **fields,
    }
    return document(losses={"lookups": 0, "loads": 2, "stores": 1, "bytes": 3 << 20, "recent": [recent]})


def test_what_a_client_lost_lately() -> None:
    (problem,) = problems(lost())
    assert problem["where"] == "losses"
    assert problem["fact"].startswith(
        "'vllm worker 0' (process 12) lost 2 loads and 1 store (3.0 MiB), the last 4 s ago: [run.deadline] 3; "
    )
    assert problem["fact"].count("busy") == 1
    assert "deadline_scale" in problem["fact"]
    assert trouble(lost()) == {"losses.loads": 2, "losses.stores": 1}


def test_a_few_losses_are_counted_and_no_problem() -> None:
    assert problems(lost(codes={"run.deadline": 2, "run.server_gone": 9})) == []


def test_what_was_lost_while_there_was_no_server_is_counted_and_no_problem() -> None:
    document = lost(codes={"run.server_gone": 3})
    assert problems(document) == []
    assert trouble(document) == {"losses.loads": 2, "losses.stores": 1}


def test_doors_that_are_shut() -> None:
    seen = {"in_use": 700, "limit": 1000, "readers": False, "sessions": False, "local": True}
    (problem,) = problems(document(messaging={"counters": {}, "descriptors": seen}))
    fact = "700 of 1000 open files are in use: new clients and new event readers are not accepted"
    assert problem == {"where": "messaging.descriptors", "fact": fact}


def test_an_instance_that_lost_its_copier() -> None:
    (problem,) = problems(document(instances=[{"instance_id": 3, "lost": "the copier of d ended"}]))
    assert problem["fact"] == "instance 3 must register again: the copier of d ended"


def refusal(**fields: Any) -> dict[str, Any]:
    return {
        "client": "an\nengine",
        "pid": 7,
        "what": "HELLO",
        "code": "protocol.version",
        "reason": "too new",
        "ago_s": 1.0,
        **fields,
    }


def test_clients_that_have_no_cache_at_all() -> None:
    refused = [refusal(), refusal(what="server"), refusal(what="LOOKUP"), refusal(ago_s=60.0)]
    told = [problem["fact"] for problem in problems(document(messaging={"refused": refused}))]
    assert told == [
        "'an\\nengine' (process 7) is refused: [protocol.version] too new",
        "'an\\nengine' (process 7) refuses this server: [protocol.version] too new",
    ]


def test_counters_of_trouble_are_named_by_their_place() -> None:
    found = trouble(
        document(
            l1={"counters": {"dropped": 2, "stored": 9}},
            l2=[tier(), tier(corrupt=3, write_dropped=4, hits=9)],
            prefetch={"refused": 5},
            messaging={"counters": {"malformed": 6, "errors": 8, "errors.run.handler": 7, "requests": 9}},
        )
    )
    assert found == {
        "l1.counters.dropped": 2,
        "l2.1.corrupt": 3,
        "l2.1.write_dropped": 4,
        "prefetch.refused": 5,
        "messaging.counters.malformed": 6,
        "messaging.counters.errors.run.handler": 7,
    }


def test_the_report_names_what_has_grown_once() -> None:
    report = CounterReport(now=100.0)
    assert not report.is_due(100.0 + EVERY_S - 1)
    assert report.is_due(100.0 + EVERY_S)
    bad = document(messaging={"counters": {"malformed": 6, "late": 1}})
    assert report.changes(bad, 110.0) == (
        "1 answer arrived after their deadline (messaging.counters.late); "
        "6 messages were malformed (messaging.counters.malformed)"
    )
    assert not report.is_due(111.0)
    assert report.changes(bad, 120.0) == ""
    worse = document(messaging={"counters": {"malformed": 9, "late": 1}}, prefetch={"refused": 1})
    assert report.changes(worse, 130.0) == (
        "1 load was refused: too many at once (prefetch.refused); "
        "3 messages were malformed (messaging.counters.malformed)"
    )
    worst = document(l2=[tier(corrupt=2)], messaging={"counters": {"errors.request.range": 5}})
    assert report.changes(worst, 140.0) == (
        "2 values were damaged and were deleted, in redis (l2.0.corrupt); "
        "5 requests were answered with an error (messaging.counters.errors.request.range)"
    )


def test_the_report_of_values_that_were_not_stored_says_why() -> None:
    why = "/mnt/kv: No space left on device"
    one = document(l2=[tier(name="filesystem", store_failed=1, last_error=why)])
    more = document(l2=[tier(name="filesystem", store_failed=3, last_error=why)])
    report = CounterReport(now=100.0)
    assert report.changes(one, 110.0) == f"1 value could not be stored in filesystem: {why} (l2.0.store_failed)"
    assert report.changes(more, 120.0) == f"2 values could not be stored in filesystem: {why} (l2.0.store_failed)"
    unknown = document(l2=[tier(name="filesystem", store_failed=4, last_error="")])
    assert report.changes(unknown, 130.0) == "1 value could not be stored in filesystem (l2.0.store_failed)"


def test_every_counter_of_trouble_has_words_for_the_log() -> None:
    for place, counter in COUNTERS.items():
        assert counter.unit, place
        assert counter.metric, place
        assert place.endswith(counter.label or place.rpartition(".")[2]) or counter.label


def test_a_plugin_declares_counters_of_its_own() -> None:
    counts = Counts(renewed=Counter("leases", "were renewed late", trouble=True), asked=Counter("questions"))
    counts.add("renewed", 2)
    counts.add("asked")
    with pytest.raises(KeyError):
        counts.add("unknown")
    own = document(
        l2=[tier(details={"counters": counts.status()})], transports={"copying": {"counters": counts.status()}}
    )
    assert trouble(own) == {"l2.0.details.counters.renewed": 2, "transports.copying.counters.renewed": 2}
    assert CounterReport(0.0).changes(own, 10.0) == (
        "2 leases were renewed late (transports.copying.counters.renewed); "
        "2 leases were renewed late, in redis (l2.0.details.counters.renewed)"
    )


@pytest.mark.parametrize("counters", [7, {"a": 1}, {"a": {"value": "many"}}, [1]])
def test_what_a_plugin_calls_counters_and_is_none_is_passed_over(counters: object) -> None:
    assert trouble(document(l2=[tier(details={"counters": counters})])) == {}
