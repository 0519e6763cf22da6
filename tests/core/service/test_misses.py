"""Why a lookup missed: the pure parts, by tables, and against a search of all objects."""

from __future__ import annotations

from math import inf
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.api.keys import CacheKey, ObjectKey, salt_digest
from kvframework.api.layout import GroupDesc, MemoryLayoutDesc
from kvframework.api.listener import Finished, RequestRecord, TierCall
from kvframework.api.requests import ClientInfo
from kvframework.record_ring import RecordRing
from kvframework.service.miss_reasons import START_EXPLAINS_S, Row, decide, elsewhere
from kvframework.service.recent_requests import MOST, FinishedRequests
from kvframework.service.records import EVERY_S, IDLE_S, MissReason, RequestLog
from kvframework.status import REASONS
from kvframework.storage.l1.eviction_statistics import Cause, Ghost
from kvframework.storage.namespaces import NamespaceRecord
from tests.support.waiting import wait_until

HERE, THERE, ELSEWHERE = b"h" * 16, b"t" * 16, "other_namespace"
DESC = MemoryLayoutDesc(256, (GroupDesc((2, 2, 256, 8), "float16"),))
RECORD = NamespaceRecord("m", 1, DESC)
EVICTED = Ghost(Cause.ROOM, 50.0, 40.0, "other")


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, "never_stored"),
        ({"named": False}, "unknown_namespace"),
        ({"from_before": True, "up_s": 10.0}, "server_started"),
        ({"from_before": True, "up_s": START_EXPLAINS_S}, "never_stored"),
        ({"from_before": True, "named": False}, "server_started"),
        ({"elsewhere": MissReason("other_salt"), "from_before": True}, "other_salt"),
        ({"ghost": EVICTED, "elsewhere": MissReason("other_salt")}, "evicted"),
        ({"ghost": Ghost(Cause.WATERMARK, 1, 2)}, "evicted"),
        ({"ghost": Ghost(Cause.TENANT, 1, 2)}, "evicted"),
        ({"ghost": EVICTED, "tiers_cleared_at": 49.0}, "evicted"),
        ({"ghost": EVICTED, "tiers_cleared_at": 51.0}, "cleared"),
        ({"ghost": EVICTED, "refused": True}, "timed_out"),
        ({"ghost": EVICTED, "refused": True, "down": "redis: a call failed"}, "tier_down"),
    ],
)
def test_the_facts_decide(facts: dict[str, Any], reason: str) -> None:
    assert decide(**facts).reason == reason


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_of_a_ghost_has_a_reason(cause: Cause) -> None:
    assert decide(ghost=Ghost(cause, 1.0)).reason in REASONS


@given(
    down=st.sampled_from(["", "disk: the tier is down"]),
    refused=st.booleans(),
    ghost=st.none() | st.builds(Ghost, st.sampled_from(Cause), st.floats(0, 9), st.floats(0, 9)),
    tiers_cleared_at=st.just(-inf) | st.floats(0, 9),
    elsewhere=st.none() | st.sampled_from([MissReason("other_salt"), MissReason("other_namespace")]),
    named=st.booleans(),
    from_before=st.booleans(),
    up_s=st.floats(0, 1e5),
)
def test_there_is_always_one_reason(**facts: Any) -> None:
    assert decide(**facts).reason in REASONS


def key(namespace: bytes = HERE, salt: str = "", rank: int = 0, digest: bytes = b"d" * 32) -> bytes:
    return ObjectKey(namespace, salt_digest(salt), rank, 0, digest).pack()


def row(record: NamespaceRecord | None = RECORD, **fields: Any) -> Row:
    return key(**fields)[:-32], record


def other(**changes: Any) -> NamespaceRecord:
    group = GroupDesc(
        changes.pop("shape", (2, 2, 256, 8)), changes.pop("dtype", "float16"), window=changes.pop("window", 0)
    )
    desc = MemoryLayoutDesc(256, (group,) * changes.pop("groups", 1))
    return NamespaceRecord(changes.pop("model", "m"), changes.pop("world_size", 1), desc)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], None),
        ([row(None, namespace=THERE)], None),
        ([row(salt="s")], MissReason("other_salt", "stored with a salt, asked without one")),
        ([row(other(dtype="int8"), namespace=THERE)], MissReason(ELSEWHERE, "stored with dtype int8, not float16")),
        ([row(other(window=64), namespace=THERE)], MissReason(ELSEWHERE, "stored with window 64, not 0")),
        ([row(other(groups=2), namespace=THERE)], MissReason(ELSEWHERE, "stored with 2 layer groups, asked with 1")),
        ([row(other(world_size=4), namespace=THERE)], MissReason(ELSEWHERE, "stored with world size 4, asked with 1")),
        (
            [row(other(), namespace=THERE)],
            MissReason(ELSEWHERE, "stored with other weights, revision, quantisation or packing"),
        ),
        ([row(other(model="n"), namespace=THERE)], MissReason(ELSEWHERE, "stored under the model name 'n'")),
        ([row(other(model="n", dtype="float32"), namespace=THERE)], None),
        (
            [row(other(model="n"), namespace=THERE), row(other(dtype="int8"), namespace=THERE)],
            MissReason(ELSEWHERE, "stored with dtype int8, not float16"),
        ),
        (
            [row(other(), namespace=THERE), row(salt="s")],
            MissReason("other_salt", "stored with a salt, asked without one"),
        ),
        ([row(rank=1)], MissReason("never_stored", "rank 0 did not store the chunk, but another rank or group did")),
    ],
)
def test_where_else_the_chunk_is_says_why_it_is_not_here(rows: list[Row], expected: MissReason | None) -> None:
    assert elsewhere(key(), RECORD, "m", rows) == expected


def test_a_namespace_that_is_known_elsewhere_only() -> None:
    found = elsewhere(key(), None, "m", [row(namespace=THERE)])
    assert found.reason == "other_namespace"
    assert elsewhere(key(), None, "another", [row(namespace=THERE)]) is None


# the ring


class _Client(ClientInfo):
    session_id, pid, name, local = 3, 7, "engine", True


def add(requests: RequestLog, request: str, outcome: str, request_id: str = "r", trace: str = "", **found: Any) -> None:
    key = CacheKey("m", 1, 0, bytes(16), 0, 512, request_id, trace=trace)
    begun = msgspec.structs.replace(requests.begun(request, _Client(), key, "engine"), monotonic=1.0)
    requests.end(begun, outcome, **found)


def ring() -> tuple[RequestLog, FinishedRequests]:
    requests = RequestLog(lambda: 3.0)
    return requests, FinishedRequests(b"boot", requests)


def test_the_ring_forgets_the_oldest_and_never_counts_back() -> None:
    requests, finished = ring()
    for _ in range(MOST + 10):
        add(requests, "LOOKUP", "hit")
    reply = finished.after(0)
    assert [record.number for record in reply.records] == list(range(11, MOST + 11))
    assert (reply.last, reply.forgotten) == (MOST + 10, 10)
    assert finished.after(MOST + 10).records == ()
    assert finished.after(MOST + 100) == finished.after(MOST + 10)


@given(st.integers(0, 40), st.integers(0, 45), st.integers(0, 45))
def test_a_reader_gets_all_that_it_has_not_seen(number: int, after: int, most: int) -> None:
    requests, finished = ring()
    for count in range(number):
        add(requests, "STORE", "stored", f"r{count % 3}")
    expected = [index for index in range(1, number + 1) if index > after]
    assert [record.number for record in finished.after(after, most).records] == expected[:most]
    of_one = [record.number for record in finished.after(after, request_id="r1").records]
    assert of_one == [index for index in expected if (index - 1) % 3 == 1]


def test_a_record_has_its_duration_and_the_wall_clock_of_its_cause() -> None:
    requests, finished = ring()
    add(requests, "LOOKUP", "miss", why=MissReason("evicted", "", 2.5, 1.5, "other"))
    (record,) = finished.after(0).records
    assert (record.seconds, record.monotonic, record.at - record.cause_at) == (2.0, 3.0, pytest.approx(0.5))
    assert (record.reason, record.idle_s, record.by) == ("evicted", 1.5, "other")


def test_sampled_requests_have_a_ring_of_their_own_and_their_calls_to_tiers() -> None:
    (requests, finished), calls = ring(), (TierCall("redis", "get", 1.5, 0.5, 4, 4, True),)
    trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
    add(requests, "LOOKUP", "hit", "sampled", trace, tier_calls=calls)
    for _ in range(MOST + 1):
        add(requests, "LOOKUP", "hit")
    reply = finished.after(0, traced=True)
    assert [(each.number, each.request_id, each.trace) for each in reply.records] == [(1, "sampled", trace)]
    assert [(call.tier, call.found) for call in reply.records[0].tier_calls] == [("redis", 4)]
    assert (reply.last, reply.forgotten) == (1, 0)
    assert not any(each.trace for each in finished.after(0).records)
    for _ in range(MOST + 1):
        add(requests, "LOOKUP", "hit", "sampled", trace)
    flooded = finished.after(reply.last, traced=True)
    assert (len(flooded.records), flooded.last, flooded.forgotten) == (MOST, MOST + 2, 1)


# the way to those who count


def test_records_are_counted_without_being_asked_for_or_at_once_where_somebody_asks() -> None:
    requests, received = RequestLog(), list[str]()
    requests.listeners.append(lambda record: received.append(record.request_id))
    for number in range(100):
        add(requests, "STORE", "stored", str(number))
    assert requests.count(10)
    assert len(received) == 10
    assert not requests.count()
    assert received == [str(number) for number in range(100)]
    requests.start()
    try:
        add(requests, "STORE", "stored", "last")
        wait_until(lambda: received[-1] == "last", what="the record")
    finally:
        requests.stop()


def test_a_listener_of_a_plugin_gets_the_same_record() -> None:
    ring = RecordRing(wanted=True)
    reader = ring.open()
    requests, received = RequestLog(ring=ring), list[RequestRecord]()
    requests.listeners.append(received.append)
    add(requests, "RETRIEVE", "hit", objects=2, nbytes=9)
    ring.added([])
    requests.count()
    (record, _) = reader.take().records
    assert [record] == received
    assert record is received[0]
    with pytest.raises(AttributeError):
        record.nbytes = 0  # type: ignore[misc, union-attr]


def test_what_is_for_listeners_alone_is_not_answered() -> None:
    requests, finished = ring()
    add(requests, "LOOKUP", "hit", prefix=b"secret")
    (record,) = finished.after(0).records
    assert type(record) is Finished
    assert b"secret" not in msgspec.msgpack.encode(record)


def test_records_are_counted_seldom_while_none_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server at rest takes little of a core."""
    log, waits = RequestLog(), list[float]()

    def wait(timeout: float) -> bool:
        waits.append(timeout)
        if len(waits) == 3:
            add(log, "STORE", "stored")
        return len(waits) == 5

    monkeypatch.setattr(log._ended, "wait", wait)
    log._run()
    assert waits == [EVERY_S, IDLE_S, IDLE_S, EVERY_S, IDLE_S]
