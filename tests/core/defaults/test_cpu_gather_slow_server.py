"""The transport `cpu_gather` beside a server that answers late: the engine goes on, and nothing stays locked."""

from __future__ import annotations

import threading

import pytest

from kvframework.api.futures import Future, Promise
from kvframework.api.transport import StoreOutcome
from kvframework.errors import Cancelled, DeadlineExceeded
from tests.core.defaults.arena_link import ArenaLink
from tests.core.defaults.gather_engine import CHUNK, IDS, Engine, both_ways, digest, key
from tests.support.lazy import torch
from tests.support.waiting import wait_until

__all__ = ["both_ways"]
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    global torch, TransferTask, TaskRunner, YieldPoint
    import torch

    from kvf_cpu_gather.transfer_steps import TaskRunner, TransferTask, YieldPoint


PATIENCE_S = 60.0
OTHERS = [[0, 1, 3, 4]]


class Seen:
    """An event that says in which thread it was waited for, and holds that thread until the gate opens."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.threads: list[threading.Thread] = []
        self.gate = threading.Event()
        if is_open:
            self.gate.set()

    def synchronize(self) -> None:
        self.threads.append(threading.current_thread())
        assert self.gate.wait(PATIENCE_S)


class WireLink(ArenaLink):
    """A server across the wire that lacks all that is stored."""

    def missing_chunks(self, transfer):
        return Future.resolved(list(range(2)))

    def store_chunks(self, transfer, objects, buffers):
        self.objects.update({(digest(index), 0): None for index in objects})
        return Future.resolved(StoreOutcome(stored=len(objects)))


def answer(engine: Engine) -> None:
    engine.link.pending.pop(0)()


def test_what_waits_for_an_answer_is_copied_in_another_thread():
    engine, event = Engine(), Seen()
    engine.link.slow = {"prepare_store", "commit_store", "prepare_load", "commit_load"}
    stored = engine.store(event=event)
    assert not stored.query()
    assert event.threads == []
    answer(engine)
    wait_until(lambda: engine.link.pending, PATIENCE_S, "the COMMIT")
    assert event.threads[0].name == "kvf-gather"
    assert not stored.query()
    answer(engine)
    assert stored.result(PATIENCE_S) == StoreOutcome(stored=2)
    loaded = engine.load(OTHERS, event=event)
    answer(engine)
    wait_until(lambda: engine.link.pending, PATIENCE_S, "the COMMIT")
    answer(engine)
    assert loaded.result(PATIENCE_S).ok
    assert torch.equal(engine.tokens(OTHERS[0]), engine.tokens(IDS[0]))
    engine.transport.close()


def test_a_server_that_answers_at_once_starts_no_thread():
    engine, event = Engine(), Seen()
    assert engine.store(event=event).query()
    assert engine.load(OTHERS, event=event).query()
    assert event.threads == [threading.current_thread()] * 2


@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_cancelled_transfer_ends_at_once_and_gives_its_lease_back_when_it_comes(kind):
    engine = Engine()
    if kind == "load":
        engine.store()
    before = engine.tokens(OTHERS[0]).clone()
    engine.link.slow = {f"prepare_{kind}"}
    future = engine.store() if kind == "store" else engine.load(OTHERS)
    assert not future.query()
    future.cancel()
    assert future.query(), "its blocks may be written by others"
    assert (future.result(0).ok, future.result(0).error) == (False, Cancelled.code)
    answer(engine)
    assert engine.link.open_leases == 0
    assert torch.equal(engine.tokens(OTHERS[0]), before)


@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_transfer_cancelled_behind_its_answer_gives_its_lease_back(kind):
    """The answer is there, and the thread that would go on with it is busy with another copy."""
    engine, event = Engine(), Seen(is_open=False)
    if kind == "load":
        engine.store()
    engine.link.slow = {"prepare_store", "prepare_load"}
    other = engine.store(cache_key=key(2 * CHUNK, 4 * CHUNK), event=event)
    answer(engine)
    wait_until(lambda: event.threads, PATIENCE_S, "the other copy")
    future = engine.store() if kind == "store" else engine.load(OTHERS)
    answer(engine)
    assert engine.link.open_leases == 2
    future.cancel()
    assert future.result(0).error == Cancelled.code
    assert engine.link.open_leases == 1
    event.gate.set()
    assert other.result(PATIENCE_S).ok
    engine.transport.close()
    assert engine.link.open_leases == 0


def test_who_cancels_in_the_midst_of_a_copy_hears_when_it_is_over():
    engine, event = Engine(), Seen(is_open=False)
    engine.link.slow = {"prepare_store"}
    future = engine.store(event=event)
    answer(engine)
    wait_until(lambda: event.threads, PATIENCE_S, "the copy")
    future.cancel()
    assert not future.query()
    event.gate.set()
    assert not future.result(PATIENCE_S).ok
    wait_until(lambda: engine.link.open_leases == 0, PATIENCE_S, "the end of the lease")


@pytest.mark.parametrize("path", ["arena", "wire"])
def test_what_was_cancelled_in_the_midst_of_its_copy_is_never_published(path):
    """Whoever cancels may write the blocks, if not before the copy ends then when waiting for that takes too long."""
    link, event = None if path == "arena" else WireLink(Engine().desc), Seen(is_open=False)
    engine = Engine(path=path, link=link)
    engine.link.slow = {"prepare_store"}
    future = engine.store(event=event)
    if path == "arena":
        answer(engine)
    wait_until(lambda: event.threads, PATIENCE_S, "the copy")
    future.cancel()
    for tensor in engine.kv.values():
        tensor.zero_()
    event.gate.set()
    assert not future.result(PATIENCE_S).ok
    engine.transport.close()
    assert engine.link.open_leases == 0
    assert engine.link.objects == {}


def test_close_waits_for_a_copy_and_cancels_what_waits_for_the_server():
    engine, event = Engine(), Seen(is_open=False)
    engine.link.slow = {"prepare_store"}
    waiting, copying = engine.store(), engine.store(event=event)
    engine.link.pending.pop()()
    wait_until(lambda: event.threads, PATIENCE_S, "the copy")
    closing = threading.Thread(target=engine.transport.close)
    closing.start()
    assert not waiting.result(PATIENCE_S).ok
    assert closing.is_alive()
    event.gate.set()
    closing.join(PATIENCE_S)
    assert not copying.result(0).ok
    answer(engine)
    assert engine.link.open_leases == 0


def test_a_commit_that_is_not_answered_in_time_leaves_the_outcome_unknown(caplog):
    engine = Engine()
    engine.link.failing["commit_store"] = DeadlineExceeded("no answer within 2 s")
    future = engine.store()
    assert future.result() == StoreOutcome(unknown=2, error="run.deadline")
    assert not future.result().ok
    assert "run.deadline" in caplog.text
    assert engine.link.open_leases == 0


def test_without_a_further_thread_a_transfer_that_has_to_wait_is_a_miss(monkeypatch):
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    engine = Engine()
    engine.link.slow = {"prepare_store"}
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert not engine.store().result(0).ok
    answer(engine)
    assert engine.link.open_leases == 0


def test_courses_of_one_instance_do_not_wait_for_each_other():
    tasks, answers = TaskRunner(), [Promise() for _ in range(50)]

    def steps(future):
        return (yield future)

    futures = [tasks.start(steps(each), lambda result, _error: result, None, here=True) for each in answers]
    for number, each in reversed(list(enumerate(answers))):
        each.set_result(number % 2 == 0)
        assert futures[number].result(PATIENCE_S) is (number % 2 == 0)
    tasks.close()


def test_a_store_cancelled_before_its_commit_was_answered_is_unknown():
    engine = Engine()
    engine.link.slow = {"commit_store"}
    stored = engine.store()
    stored.cancel()
    assert stored.result(0) == StoreOutcome(unknown=2, error=Cancelled.code)
    answer(engine)
    engine.transport.close()


@pytest.mark.parametrize("answered", [0, 1])
def test_a_store_cancelled_over_the_wire_counts_what_was_answered(monkeypatch, answered):
    """Two batches are sent; one of them, the first or the second, has its answer."""
    monkeypatch.setattr("kvf_cpu_gather.wire_path.BATCH_OBJECTS", 1)
    link, sent = WireLink(Engine().desc), []
    monkeypatch.setattr(link, "store_chunks", lambda *_: sent.append(Promise()) or sent[-1])
    engine = Engine(path="wire", link=link)
    stored = engine.store()
    wait_until(lambda: len(sent) == 2, PATIENCE_S, "both batches")
    sent[answered].set_result(StoreOutcome(stored=1))
    stored.cancel()
    assert stored.result(PATIENCE_S) == StoreOutcome(stored=1, unknown=1, error=Cancelled.code)
    engine.transport.close()


def test_threads_that_advance_a_load_at_once_take_turns():
    """One of them found the next point without a word of how much it may copy, and the load failed."""
    points = [YieldPoint() for _ in range(4)]

    def steps():
        for point in points:
            yield point
            point.moved = 1
        return "whole"

    task = TransferTask(steps(), lambda result, error: error or result, None, lambda *_: None)
    points[0].add_done_callback(lambda _: task.advance(1))
    task.go_on()
    assert task.advance(1) == 1
    assert not points[1].query()
    assert [task.advance(1) for _ in range(4)] == [1, 1, 1, 0]
    assert task.future.result(0) == "whole"
