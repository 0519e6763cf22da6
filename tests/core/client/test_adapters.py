"""The adapters of an engine integration against a real server process, through its deaths and silences. Futures and
plans in every state: resolved twice, cancelled while they are resolved, aborted, badly answered. The trace of the
calling thread, with OpenTelemetry here, absent, or of another kind."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from kvframework import errors
from kvframework.api.futures import Future, Promise
from kvframework.api.transport import ArenaRange, LoadOutcome, LoadPlan, StoreOutcome, StorePlan
from kvframework.client import KVClient, RequestHashes, SchedulerAdapter, WorkerAdapter, current_trace
from kvframework.client.session import mapped
from kvframework.errors import Cancelled, DeadlineExceeded, ServerGone
from kvframework.messaging.client.link import Answer
from kvframework.wire import messages as m
from tests.support.engines import AXES, BLOCK, BLOCKS, CHUNK, DIM, HEADS, PagedEngine
from tests.support.lazy import torch
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.torch


def test_the_server_shows_what_the_model_computes_in(server: ServerProcess, client: KVClient) -> None:
    PagedEngine(client, model_dtype="bfloat16")
    (instance,) = server.status()["instances"]
    assert (instance["dtype"], instance["model_dtype"]) == ("float32", "bfloat16")


def test_the_trace_of_a_request_rides_in_each_of_its_requests(server: ServerProcess, client: KVClient) -> None:
    engine = PagedEngine(client)
    trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
    request = RequestHashes(client.hasher, CHUNK, request_id="r", trace=trace)
    request.extend(list(range(512)))
    blocks = [list(range(32))]
    assert engine.worker.submit_store(request, 0, 512, blocks).result(30).ok
    engine.scheduler.free(engine.scheduler.lookup(request))
    assert engine.worker.submit_retrieve(request, 0, 512, blocks).result(30).ok
    untraced = engine.request(list(range(512)), "q")
    engine.scheduler.free(engine.scheduler.lookup(untraced))
    with server.client() as watcher:
        records = watcher.call("RECENT", m.Recent()).records
        assert [(each.request, each.trace) for each in records if each.request_id == "r"][-3:] == [
            (name, trace) for name in ("STORE", "LOOKUP", "RETRIEVE")
        ]
        assert {each.trace for each in records if each.request_id == "q"} == {""}
        sampled = watcher.call("RECENT", m.Recent(traced=True))
        assert {each.trace for each in sampled.records} == {trace}
        assert watcher.call("RECENT", m.Recent(sampled.last, traced=True)).records == ()


def test_a_miss_in_l2_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    l2 = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}")
    with ServerProcess(*l2) as server, server.engine_client() as client:
        engine = PagedEngine(client)
        asked = engine.scheduler.lookup(engine.request(list(range(512))))
        assert asked.pending
        assert asked.ticket
        found = engine.scheduler.wait(asked, 10)
        assert (found.hit_tokens, found.ticket, found.pending) == (0, "", False)
        engine.scheduler.free(found)
        engine.scheduler.end_request("r")
        assert server.status()["messaging"]["counters"].get("errors.request.lease", 0) == 0
        engine.scheduler.free(asked)  # a ticket that is over: nothing is left to let go
        assert engine.scheduler.failures == 0
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
        engine.worker.close()


def test_without_a_server_everything_is_a_miss() -> None:
    with KVClient("ipc:///tmp/kvf-no-such-directory/s.sock", connect_timeout_s=0.2) as client:
        scheduler = SchedulerAdapter(client, model_name="m", namespace=b"n" * 16, chunk_tokens=CHUNK)
        with pytest.raises(errors.ServerGone, match="no server answers"):
            _ = client.chunk_size
        from kvf_hashers.sha256 import Sha256

        request = RequestHashes(Sha256(), CHUNK, request_id="r")
        request.extend([1] * 256)
        assert scheduler.lookup(request).hit_tokens == 0
        assert scheduler.failures == 1


def test_an_unknown_transport_or_layout_is_a_clear_error(client: KVClient) -> None:
    worker = WorkerAdapter(client, instance_id=1, model_name="m", transport="warp", layout_options={"axes": AXES})
    kv = {"layer0": torch.zeros(2, BLOCKS, BLOCK, HEADS, DIM)}
    with pytest.raises(errors.TransportMismatch, match="no transport"):
        worker.register_kv_caches(kv, block_size=BLOCK)
    with pytest.raises(errors.PluginNotFound):
        WorkerAdapter(client, instance_id=1, model_name="m", layout="nope").register_kv_caches(kv, block_size=BLOCK)


def test_close_unregisters(server: ServerProcess, client: KVClient) -> None:
    engine = PagedEngine(client)
    engine.worker.close()
    engine.worker.close()
    with server.client() as watcher:
        assert watcher.status()["instances"] == []


def test_a_store_has_its_outcome_whatever_becomes_of_it(server: ServerProcess, client: KVClient) -> None:
    engine = PagedEngine(client)
    blocks = [list(range(32))]
    request = engine.request(list(range(512)))
    stored = engine.worker.submit_store(request, 0, 512, blocks)
    assert stored.result(20) == StoreOutcome(stored=2)
    server.kill9()
    wait_until(lambda: not client.usable, what="the client to see the server's end")
    for start, end in ((0, 512), (256, 512)):
        away = engine.worker.submit_store(request, start, end, [blocks[0][start // 16 :]])
        assert away.result(0) == StoreOutcome(dropped=(end - start) // 256, error="run.server_gone")
    engine.worker.close()
    closed = engine.worker.submit_store(request, 0, 256, [blocks[0][:16]])
    assert closed.result(0) == StoreOutcome(dropped=1, error="request.not_registered")


def test_a_load_of_what_was_never_stored_is_not_called_evicted(
    client: KVClient, caplog: pytest.LogCaptureFixture
) -> None:
    engine = PagedEngine(client)
    loaded = engine.worker.submit_retrieve(engine.request(list(range(256))), 0, 256, [list(range(16))])
    assert not loaded.result(20)
    assert "some objects are not in L1" in caplog.text
    assert "evicted" not in caplog.text


@pytest.mark.parametrize("start", [100, -256, 1.5, None])
def test_a_lookup_from_within_a_chunk_is_the_engines_mistake(client: KVClient, start: Any) -> None:
    engine = PagedEngine(client)
    with pytest.raises(errors.BadRange, match="start"):
        engine.scheduler.lookup(engine.request(list(range(512))), start)
    engine.worker.close()


def test_a_workers_scheduler_asks_for_all_ranks(client: KVClient) -> None:
    """A hit is what both ranks have, and the world size is the registered one."""
    ranks = [PagedEngine(client, 70 + rank, world_size=2, rank=rank) for rank in range(2)]
    scheduler, blocks = ranks[1].worker.scheduler(), [list(range(16))]
    hits = []
    for engine in ranks:
        request = engine.request([7, *range(255)])
        assert engine.worker.submit_store(request, 0, 256, blocks).result(30).ok
        found = scheduler.lookup(request)
        hits.append(found.hit_tokens)
        scheduler.free(found)
    assert hits == [0, 256]
    for engine in ranks:
        engine.worker.close()
    with pytest.raises(errors.NotRegistered):
        ranks[0].worker.scheduler()


def test_a_store_whose_request_has_ended_says_so(client: KVClient) -> None:
    """Its lease ended with the request, in the midst of the copy."""
    engine = PagedEngine(client)
    request = engine.request([9, *range(255)])

    class Ends:
        def synchronize(self) -> None:
            engine.scheduler.end_request(request.request_id)

    stored = engine.worker.submit_store(request, 0, 256, [list(range(16))], event=Ends())  # type: ignore[arg-type]
    assert stored.result(30) == StoreOutcome(dropped=1, error=errors.LeaseUnknown.code)
    engine.worker.close()


ANSWER = Answer(m.Empty())
RANGES = (ArenaRange(0, 0, 0, 64), ArenaRange(1, 0, 64, 64))


class ResolvedMeanwhile(Promise[int]):
    """Another thread resolves it just after its `cancel` has seen that there is a hook."""

    @property
    def _cancel_hook(self) -> Callable[[], None] | None:  # type: ignore[override]
        hook, self.hook = self.hook, None
        return hook

    @_cancel_hook.setter
    def _cancel_hook(self, hook: Callable[[], None] | None) -> None:
        self.hook = hook


def test_the_first_of_two_results_stays_and_callbacks_run_once() -> None:
    seen: list[object] = []
    promise: Promise[int] = Promise()
    promise.add_done_callback(seen.append)
    assert promise.set_result(1)
    assert not promise.set_result(2)
    assert not promise.set_exception(ServerGone("gone"))
    promise.cancel()
    assert (promise.result(0), promise.exception(), seen) == (1, None, [promise])


def test_a_promise_that_is_never_resolved_ends_a_wait_and_stays_pending() -> None:
    promise: Promise[int] = Promise()
    with pytest.raises(DeadlineExceeded):
        promise.result(0)
    assert not promise.wait(0)
    assert promise.set_result(3)
    assert promise.result(0) == 3


def test_a_future_that_is_resolved_while_it_is_cancelled_raises_nothing() -> None:
    called = threading.Event()
    promise = ResolvedMeanwhile(called.set)
    promise.cancel()
    assert called.is_set()


def rubbish(_answer: Answer) -> Any:
    raise ZeroDivisionError("unforeseen")


def test_an_answer_that_cannot_be_converted_fails_its_future() -> None:
    sent = Future.resolved(ANSWER)
    for future in (mapped(sent, rubbish), mapped(sent, rubbish, release=lambda _: None)):
        assert isinstance(future.exception(), ZeroDivisionError)
    assert mapped(sent, rubbish, failed=LoadOutcome.failed).result(0) == LoadOutcome(False, "unforeseen", "error")


def test_a_grant_that_comes_behind_its_cancel_is_given_back_once() -> None:
    sent: Promise[Answer] = Promise()
    given_back: list[str] = []
    future = mapped(sent, lambda _: "lease", release=given_back.append)
    future.cancel()
    assert isinstance(future.exception(), Cancelled)
    sent.set_result(ANSWER)
    future.cancel()
    assert given_back == ["lease"]


def store_plan(calls: list[str], ranges: tuple[ArenaRange, ...] = RANGES) -> StorePlan:
    def commit() -> Future[StoreOutcome]:
        calls.append("commit")
        return Future.resolved(StoreOutcome(stored=len(ranges), present=1))

    outcome = StoreOutcome(present=1)
    return StorePlan(memoryview(b""), ranges, outcome, commit=commit, abort=lambda: calls.append("abort"))


def load_plan(calls: list[str]) -> LoadPlan:
    def commit() -> Future[LoadOutcome]:
        calls.append("commit")
        return Future.resolved(LoadOutcome(True))

    def abort() -> None:
        calls.append("abort")

    return LoadPlan(memoryview(b""), RANGES, commit=commit, abort=abort, receive=lambda _: Future.resolved(()))


@pytest.mark.parametrize("make", [store_plan, load_plan])
def test_a_plan_ends_once(make: Callable[[list[str]], Any]) -> None:
    calls: list[str] = []
    with make(calls) as plan:
        plan.commit()
        plan.abort()
    assert calls == ["commit"]
    with make(calls) as plan:
        plan.abort()
        plan.abort()
    assert calls == ["commit", "abort"]
    with pytest.raises(KeyboardInterrupt), make(calls):
        raise KeyboardInterrupt
    assert calls == ["commit", "abort", "abort"]


def test_what_was_aborted_is_not_called_stored() -> None:
    calls: list[str] = []
    with store_plan(calls) as plan:
        plan.abort()
        assert plan.commit().result(0) == StoreOutcome(present=1, dropped=2)
    with load_plan(calls) as load:
        load.abort()
        assert not load.commit().result(0).ok
    assert calls == ["abort", "abort"]
    with store_plan(calls, ()) as nothing_to_write:
        assert nothing_to_write.commit().result(0) == StoreOutcome(present=1)
    assert calls == ["abort", "abort"]


TRACE, SPAN = 0xAB, 0xCD


@pytest.mark.parametrize(("flags", "traced"), [(1, f"00-{TRACE:032x}-{SPAN:016x}-01"), (0, "")])
def test_the_current_span_is_the_parent_if_it_is_sampled(flags: int, traced: str) -> None:
    with use_span(NonRecordingSpan(SpanContext(TRACE, SPAN, is_remote=False, trace_flags=TraceFlags(flags)))):
        assert current_trace() == traced


def test_outside_of_a_span_there_is_none() -> None:
    assert current_trace() == ""


@pytest.mark.parametrize("module", [None, SimpleNamespace(), SimpleNamespace(get_current_span=lambda: None)])
def test_without_opentelemetry_or_with_another_there_is_none(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    if module is None:
        monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    else:
        monkeypatch.setitem(sys.modules, "opentelemetry.trace", module)
    assert current_trace() == ""
