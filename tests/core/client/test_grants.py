"""Loads that a lookup has prepared: they ask the server nothing, and their pins are their own."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest

from kvframework.api.layout import KVLayout, LayerGroup
from kvframework.api.transport import LoadPlan
from kvframework.client import LookupResult, RequestHashes, WorkerAdapter
from kvframework.client.hashing import content_name
from kvframework.client.kv_client import PIECES_S, SPARE_S
from kvframework.errors import BadBlockIds, BadLayout, BadRange, DeadlineExceeded, LeaseUnknown
from kvframework.service.engine_driven import MAX_OF_ASKER
from kvframework.wire import messages as m
from kvframework.wire.transfer_blocks import unpack_offsets
from tests.core.client.load_engine import TOKENS, Engine
from tests.support.lazy import torch
from tests.support.server_process import ServerProcess, server_fixture
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for, register_tiny

BLOCKS = list(range(32))
AXES = ["plane", "block", "token", "head", "dim"]


server = server_fixture("server.ticket_s=30")


@pytest.fixture
def engine(request: Any, server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Of as many clients as the test says, two otherwise."""
    with ExitStack() as stack:
        clients = [stack.enter_context(server.engine_client()) for _ in range(getattr(request, "param", 2))]
        yield Engine(server, clients, monkeypatch)


def content(plan: LoadPlan) -> bytes:
    return b"".join(plan.arena[place.offset : place.offset + place.length] for place in plan.ranges)


@pytest.mark.parametrize("engine", [1, 2], indirect=True)
def test_a_granted_load_asks_nothing_and_is_accounted_for(engine: Engine) -> None:
    found = engine.look_up()
    assert engine.pins() == 4, "the ticket's, and the load's own"
    (grant,) = found.take_grants()
    assert (grant.instance_id, grant.start, grant.end) == (7, 0, 512), "instance 8 is none"
    plan = engine.load(grant)
    assert engine.asked == []
    assert set(content(plan)) == {ord("k")}
    assert plan.commit().result().ok
    assert engine.asked == ["COMMIT_RETRIEVE unanswered"]
    engine.scheduler.free(found)
    engine.settle(0)
    records = engine.client.request("RECENT", m.Recent(), m.RecentReply).records
    assert [(each.request, each.outcome) for each in records] == [
        ("STORE", "stored"),
        ("LOOKUP", "hit"),
        ("RETRIEVE", "hit"),
    ]
    retrieved = records[-1]
    assert (retrieved.asked_tokens, retrieved.objects, retrieved.path) == (512, 2, "engine")
    assert retrieved.nbytes == sum(place.length for place in plan.ranges)
    assert retrieved.session_id == records[0].session_id
    assert retrieved.monotonic - retrieved.seconds > records[1].monotonic, "begun after the lookup"
    counters = engine.server.status()["l1"]["counters"]
    assert (counters["retrieves"], counters["retrieve_misses"]) == (1, 0)


def test_the_end_of_the_lookup_is_not_that_of_the_load(engine: Engine) -> None:
    found = engine.look_up()
    plan = engine.load(*found.take_grants())
    engine.scheduler.free(found)
    engine.settle(2)
    cleared = engine.client.request("CLEAR", m.Clear(), m.Cleared)
    assert (cleared.objects, cleared.in_use) == (0, 2), "nothing takes the place of what is read"
    assert set(content(plan)) == {ord("k")}
    assert plan.commit().result().ok
    engine.settle(0)


def test_what_no_load_takes_is_given_back(engine: Engine) -> None:
    engine.scheduler.free(engine.look_up())
    engine.settle(0)
    assert engine.server.status()["l1"]["counters"]["retrieves"] == 0


def test_a_request_has_its_grants_until_they_are_taken(engine: Engine) -> None:
    found = engine.look_up()
    assert engine.request.grants.take(7, 0, 256) is None
    assert engine.request.grants.take(8, 0, 512) is None
    assert engine.request.grants.take(7, 0, 512) is not None
    assert engine.request.grants.take(7, 0, 512) is None
    assert found.take_grants() == ()


@pytest.mark.parametrize(
    "wrong",
    [{"boot_id": b"another server.."}, {"began": 0.0}, {"instance_id": 8}, {"start": 256}, {"content": bytes(32)}],
    ids=["another server", "an earlier session", "another instance", "other tokens", "another prompt"],
)
def test_a_grant_that_is_for_something_else_is_passed_over(engine: Engine, wrong: dict[str, Any]) -> None:
    (grant,) = engine.look_up().take_grants()
    plan = engine.load(grant._replace(**wrong))
    assert engine.asked == ["PREPARE_RETRIEVE"]
    assert set(content(plan)) == {ord("k")}
    assert plan.commit().result().ok


def test_the_content_of_a_grant_is_that_of_prompt_and_salt() -> None:
    named = content_name(b"c" * 32 + b"d" * 32, "salt")
    assert named == content_name(b"d" * 32, "salt")
    assert len({named, content_name(b"c" * 32, "salt"), content_name(b"d" * 32, ""), content_name(b"d" * 32, "s")}) == 4


@pytest.mark.parametrize(("in_pieces", "spare_s"), [(False, SPARE_S), (True, PIECES_S)])
def test_a_grant_that_ends_soon_is_passed_over(engine: Engine, in_pieces: bool, spare_s: float) -> None:
    (grant,) = engine.look_up().take_grants()
    plan = engine.load(grant._replace(until=grant.until - 30 + spare_s), in_pieces=in_pieces)
    assert engine.asked == ["PREPARE_RETRIEVE"]
    assert plan.commit().result().ok


def test_a_load_that_outlasts_its_grant_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvframework.client.kv_client.SPARE_S", 0.0)
    with ServerProcess("server.ticket_s=0.3") as server, server.engine_client() as client:
        engine = Engine(server, [client], monkeypatch)
        plan = engine.load(*engine.look_up().take_grants())
        engine.settle(0)
        assert not plan.commit().result().ok
        assert "COMMIT_RETRIEVE" in engine.asked


@pytest.mark.parametrize("engine", [1, 2], indirect=True)
def test_a_load_beside_the_end_of_its_session_asks(engine: Engine) -> None:
    plan = engine.load(*engine.look_up().take_grants())
    engine.worker.request("END_SESSION", m.EndSession(), m.SessionEnded)
    engine.asked.clear()
    assert not plan.commit().result().ok
    assert engine.asked == ["COMMIT_RETRIEVE"]


@pytest.mark.parametrize("granted", [False, True], ids=["asked for", "granted"])
@pytest.mark.parametrize("again", [False, True], ids=["and is gone", "and another one serves"])
def test_a_load_that_outlives_its_server_is_no_hit(engine: Engine, again: bool, granted: bool) -> None:
    plan = engine.load(*(engine.look_up().take_grants() if granted else (None,)))
    engine.server.kill9()
    if again:
        engine.server.start()
    assert not plan.commit().result().ok


def test_the_scheduler_may_end_while_its_worker_loads(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    with server.engine_client() as scheduler, server.engine_client() as worker:
        engine = Engine(server, [scheduler, worker], monkeypatch)
        plan = engine.load(*engine.look_up().take_grants())
        scheduler.close()
        engine.settle(2)
        assert plan.commit().result().ok
        engine.settle(0)


def test_an_older_server_is_asked_for_no_grants(engine: Engine) -> None:
    engine.client._reply = msgspec.structs.replace(engine.client.hello, features=())
    found = engine.look_up()
    assert found.take_grants() == ()
    assert engine.pins() == 2


# The server's part, message by message.


def asking(client: WireClient, key: Any, *instances: int, **fields: Any) -> m.LookupReply:
    reply: m.LookupReply = client.call(
        "LOOKUP", m.Lookup(msgspec.structs.replace(key, worker_id=None), grant=instances, **fields)
    )
    return reply


def test_who_asked_and_the_instance_give_back_and_only_the_instance_commits(server: ServerProcess) -> None:
    with server.client() as worker, server.client() as scheduler, server.client() as stranger:
        key = key_for(worker.register(7), TOKENS)
        worker.store(key, b"x", 7)
        reply = asking(scheduler, key, 7, 7, 99)
        (grant,) = reply.grants
        for each in (stranger, scheduler):
            with pytest.raises(Exception, match="unknown lease"):
                each.call("COMMIT_RETRIEVE", m.Commit(grant.lease))
        assert asking(stranger, key, free=(grant.lease,)).hit_tokens == 512
        granted_at = time.monotonic()
        wait_until(lambda: time.monotonic() > granted_at + 0.02, what="a copy")
        assert worker.call("COMMIT_RETRIEVE", m.Commit(grant.lease, took_s=0.02)).held
        (loaded,) = [each for each in scheduler.call("RECENT", m.Recent()).records if each.request == "RETRIEVE"]
        assert loaded.seconds >= 0.02
        for each in (scheduler, worker):
            unused = asking(scheduler, key, 7).grants[0].lease
            asking(each, key, free=(unused, unused, "nothing"))
            with pytest.raises(Exception, match="unknown lease"):
                worker.call("COMMIT_RETRIEVE", m.Commit(unused))


def test_an_instance_that_has_ended_is_granted_nothing(server: ServerProcess) -> None:
    with server.client() as worker, server.client() as scheduler:
        key = key_for(worker.register(7), TOKENS)
        worker.store(key, b"x", 7)
        lease = asking(scheduler, key, 7).grants[0].lease
        worker.close()
        wait_until(lambda: not asking(scheduler, key, 7).grants, what="the worker's end")
        assert asking(scheduler, key, free=(lease,)).hit_tokens == 512
        with server.client() as again:
            again.register(7)
            kept = asking(scheduler, key, 7).grants[0].lease
            with pytest.raises(LeaseUnknown):
                again.call("COMMIT_RETRIEVE", m.Commit(lease))
            assert again.call("COMMIT_RETRIEVE", m.Commit(kept)).held


def test_an_instance_that_does_not_say_of_which_rank_it_is_gets_none(server: ServerProcess) -> None:
    with server.client() as worker:
        for rank in range(2):
            key = key_for(worker.register(rank, world_size=2), TOKENS, worker_id=rank, world_size=2)
            worker.store(key, b"x", rank)
        found = asking(worker, key, 0, 1)
        assert (found.hit_tokens, found.grants) == (512, ())


def test_each_rank_is_granted_its_own_objects(server: ServerProcess) -> None:
    """By the lookup of all ranks to each instance, by that of one rank to no other."""
    group = LayerGroup(1, 16, 1, 8, "float32")
    with ExitStack() as stack:
        workers = [stack.enter_context(server.client()) for _ in range(3)]
        for number, worker in enumerate(workers):
            shape = m.RegisterKvCache(
                number, "tiny", 2, number % 2, b"n" * 16, "cpu_gather", KVLayout("paged", (group,), 4)
            )
            registered = worker.call("REGISTER_KV_CACHE", shape)
        keys = [key_for(registered, TOKENS, worker_id=rank, world_size=2) for rank in range(2)]
        for rank, key in enumerate(keys):
            workers[rank].store(key, bytes([65 + rank]), rank)
        scheduler = stack.enter_context(server.client())
        of_all = msgspec.structs.replace(keys[0], worker_id=None)
        for key, granted in ((of_all, [2, 1, 0]), (keys[0], [2, 0]), (keys[1], [1])):
            found = scheduler.call("LOOKUP", m.Lookup(key, grant=(2, 1, 0)))
            assert found.hit_tokens == 512
            assert [each.instance_id for each in found.grants] == granted
            for grant in found.grants:
                worker, rank = workers[grant.instance_id], grant.instance_id % 2
                ranges = worker.prepare_retrieve(keys[rank], grant.instance_id).ranges
                assert unpack_offsets(grant.offsets, where="offsets") == [place.offset for place in ranges]
                assert worker.call("COMMIT_RETRIEVE", m.Commit(grant.lease)).held


def test_grants_leave_leases_for_other_transfers_and_other_askers(server: ServerProcess) -> None:
    with server.client() as worker, server.client() as other:
        key = key_for(worker.register(7), TOKENS)
        worker.store(key, b"x", 7)
        grants = [asking(worker, key, 7).grants for _ in range(MAX_OF_ASKER + 1)]
        assert all(grants[:-1])
        assert grants[-1] == ()
        assert asking(other, key, 7).grants != ()
        assert worker.prepare_retrieve(key, 7).hit
        assert asking(worker, key, free=(grants[0][0].lease,)).hit_tokens == 512
        assert asking(worker, key, 7).grants != ()


def test_grants_that_no_load_ends_lapse() -> None:
    with ServerProcess("server.ticket_s=0.2") as server, server.client() as worker:
        key = key_for(worker.register(7), TOKENS)
        worker.store(key, b"x", 7)
        lapsed = asking(worker, key, 7).grants[0].lease
        wait_until(lambda: server.status()["l1"]["pins"] == 0, what="the end of the grant")
        assert not worker.call("COMMIT_RETRIEVE", m.Commit(lapsed)).held
        lapsed = asking(worker, key, 7).grants[0].lease
        wait_until(lambda: server.status()["l1"]["pins"] == 0, what="the end of the grant")
        assert asking(worker, key, 7).grants, "which forgets it"
        with pytest.raises(LeaseUnknown):
            worker.call("COMMIT_RETRIEVE", m.Commit(lapsed))


def test_an_instance_that_is_registered_anew_passes_over_what_was_granted_before(engine: Engine) -> None:
    (grant,) = engine.look_up().take_grants()
    engine.worker.request("UNREGISTER_KV_CACHE", m.Unregister(7), m.Empty)
    other = register_tiny(engine.worker, 7, "other")
    bare = other.transfer(msgspec.structs.replace(engine.key, model_name="other", namespace=other.namespace))
    engine.asked.clear()
    plan = engine.worker.prepare_load(dataclasses.replace(bare, grant=grant)).result()
    assert engine.asked[0] == "PREPARE_RETRIEVE"
    assert not plan.ranges, "these are another model's"
    engine.settle(2)


def test_what_is_passed_over_is_given_back(engine: Engine) -> None:
    found = engine.look_up()
    plan = engine.load(found.take_grants()[0]._replace(start=256))
    assert plan.commit().result().ok
    engine.scheduler.free(found)
    engine.settle(0)


@contextlib.contextmanager
def worker_with_a_hit(server: ServerProcess) -> Iterator[tuple[WorkerAdapter, RequestHashes]]:
    """A worker, and a request of 512 tokens in 32 blocks whose load is granted."""
    with server.engine_client() as client:
        caches = {"layer.0": torch.zeros(2, 64, 16, 1, 8)}
        worker = WorkerAdapter(client, instance_id=7, model_name="tiny", layout_options={"axes": AXES})
        worker.register_kv_caches(caches, block_size=16)
        request = RequestHashes(client.hasher, 256, request_id="r")
        request.extend(TOKENS)
        assert worker.submit_store(request, 0, 512, [BLOCKS]).result().ok
        assert worker.scheduler().lookup(request).hit_tokens == 512
        yield worker, request
        worker.close()


@pytest.mark.torch
def test_a_load_of_nothing_gives_its_grant_back(server: ServerProcess) -> None:
    with worker_with_a_hit(server) as (worker, request):
        assert worker.submit_retrieve(request, 0, 512, [BLOCKS], skip_first_n_tokens=512).result().ok
        wait_until(lambda: server.status()["l1"]["pins"] == 2, what="the end of the grant")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("error", "wrong"),
    [
        (BadBlockIds, {"block_ids": [[*range(31), 64]]}),
        (BadRange, {"skip_first_n_tokens": 513}),
        (BadLayout, {"kv_caches": {}}),
    ],
)
def test_a_load_that_is_refused_gives_its_grant_back(
    server: ServerProcess, error: type[Exception], wrong: dict[str, Any]
) -> None:
    with worker_with_a_hit(server) as (worker, request):
        with pytest.raises(error):
            worker.submit_retrieve(request, 0, 512, **({"block_ids": [BLOCKS]} | wrong))
        wait_until(lambda: server.status()["l1"]["pins"] == 2, what="the end of the grant")


def test_grants_of_an_answer_after_its_deadline_are_given_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    payload = m.Lookup(msgspec.structs.replace(engine.key, worker_id=None), grant=(7,))
    reply = engine.client.request("LOOKUP", payload, m.LookupReply)
    assert engine.pins() == 4
    late: list[Any] = []

    def unanswered(*_arguments: Any, on_late: Any = None, **_options: Any) -> None:
        late.append(on_late)
        raise DeadlineExceeded("no answer")

    monkeypatch.setattr(engine.client, "request", unanswered)
    asked = engine.scheduler.poll(LookupResult(0, reply.ticket, True, 512))
    assert asked.pending
    late[0](reply)
    engine.settle(2)
    engine.scheduler.free(asked)
    engine.settle(0)


def test_an_end_of_the_session_that_arrives_after_the_grant_is_known(engine: Engine) -> None:
    link, held = engine.worker._connection._link, []

    class Outbox(deque[Any]):
        def append(self, item: Any) -> None:
            held.append(item)

    assert link is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "_outbox", Outbox())
        engine.worker.send("END_SESSION", m.EndSession())
    plan = engine.load(*engine.look_up().take_grants())
    link._outbox.append(held[0])
    link._wakeup.signal()
    assert held[0].result(5)
    assert not plan.commit().result().ok


def test_a_grant_of_a_server_means_nothing_in_the_memory_of_another(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (grant,) = engine.look_up().take_grants()
    before = engine.worker._arena

    class Reconnecting(type(engine.worker._connection)):  # type: ignore[misc]
        @property
        def boot_id(self) -> Any:
            engine.worker._arena = None
            return grant.boot_id

    monkeypatch.setattr(engine.worker._connection, "__class__", Reconnecting)
    assert before is not None
    assert not engine.worker._is_good(grant, engine.transfer(), before)


def test_no_load_has_begun_before_its_grant(server: ServerProcess) -> None:
    with server.client() as worker:
        key = key_for(worker.register(7), TOKENS)
        worker.store(key, b"x", 7)
        for took_s in (1e300, math.inf):
            grant = asking(worker, key, 7).grants[0]
            assert worker.call("COMMIT_RETRIEVE", m.Commit(grant.lease, took_s=took_s)).held
        records = worker.call("RECENT", m.Recent()).records
        began = [each.monotonic - each.seconds for each in records if each.request in ("LOOKUP", "RETRIEVE")]
        assert began == sorted(began)
        assert len(began) == 4
