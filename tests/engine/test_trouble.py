"""What of a status document is trouble."""

from __future__ import annotations

from typing import Any

from kvframework.engine.trouble import EVERY_S, Account, problems, trouble


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
        "hits": 5,
        "corrupt": 0,
        **fields,
    }


def test_all_is_well() -> None:
    assert problems(document(l2=[tier()])) == []
    assert trouble(document(l2=[tier()])) == {}


def test_a_tier_whose_circuit_is_not_closed() -> None:
    circuits = {"read": "closed", "write": "open"}
    down = tier(state="open", state_s=12.34, circuits=circuits, last_error="no route to host\n  hint: find one")
    assert problems(document(l2=[tier(), down])) == [
        {"where": "l2.1", "fact": "redis is down for writes since 12 s: no route to host; hint: find one"}
    ]
    both = tier(state="half-open", circuits={"read": "half-open", "write": "open"})
    (problem,) = problems(document(l2=[both]))
    assert problem["where"] == "l2.0"
    assert "down for reads and writes" in problem["fact"]


def test_memory_that_is_not_there() -> None:
    (problem,) = problems(document(l1={"ready_bytes": 1 << 20, "capacity_bytes": 4 << 20, "counters": {}}))
    assert problem == {"where": "l1", "fact": "1.0 MiB of 4.0 MiB are resident"}


def test_an_instance_that_lost_its_copier() -> None:
    (problem,) = problems(document(instances=[{"instance_id": 3, "lost": "the copier of d ended"}]))
    assert problem["fact"] == "instance 3 has to register again: the copier of d ended"


def refusal(**fields: Any) -> dict[str, Any]:
    return {
        "client": "an\nengine", "pid": 7, "what": "HELLO", "code": "protocol.version", "reason": "too new",
        "ago_s": 1.0, **fields,
    }  # fmt: skip


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
        "l1.counters.dropped": 2, "l2.1.corrupt": 3, "l2.1.write_dropped": 4, "prefetch.refused": 5,
        "messaging.counters.malformed": 6, "messaging.counters.errors.run.handler": 7,
    }  # fmt: skip


def test_the_account_tells_what_has_grown_once() -> None:
    account = Account(now=100.0)
    assert not account.due(100.0 + EVERY_S - 1)
    assert account.due(100.0 + EVERY_S)
    bad = document(messaging={"counters": {"malformed": 6, "late": 1}})
    assert account.line(bad, 110.0) == "messaging.counters.late +1, messaging.counters.malformed +6"
    assert not account.due(111.0)
    assert account.line(bad, 120.0) == ""
    worse = document(messaging={"counters": {"malformed": 9, "late": 1}}, prefetch={"refused": 1})
    assert account.line(worse, 130.0) == "prefetch.refused +1, messaging.counters.malformed +3"
