"""The worker side of the connector as a state machine: loads, stores, what is told of them, and fences."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvf_vllm.step_messages import StepPlan, StepReport, TransferOp
from kvf_vllm.worker import WorkerSide
from kvframework.api.futures import Future, Promise
from kvframework.api.transport import LoadOutcome
from kvframework.errors import BadBlockIds
from tests.vllm.stand_ins import BLOCK, SERVED, Clock, FakeInstance

LOAD = TransferOp("a", 0, 16, b"d" * 64, "", [[1, 2, 3, 4]], skip=4)


def store(number: int = 0, request_id: str = "a", start: int = 0) -> TransferOp:
    return TransferOp(request_id, start, start + 8, b"", "", [[5, 6]], number=number)


def answers(*results: bool | Future[LoadOutcome]) -> FakeInstance:
    left = [each if isinstance(each, Future) else Future.resolved(LoadOutcome(each)) for each in results]
    return FakeInstance(lambda: left.pop(0))


def test_a_load_between_steps_is_told_once_it_has_ended() -> None:
    future: Promise[LoadOutcome] = Promise()
    worker = WorkerSide(answers(future), block_size=BLOCK)
    worker.load(StepPlan(loads=[LOAD]))
    assert worker.finished_loads() == (set(), set())
    assert worker.take_report().loaded == {}
    future.set_result(LoadOutcome(True))
    assert worker.finished_loads() == ({"a"}, set())
    assert worker.take_report().loaded == {"a": 1}
    assert worker.finished_loads() == (set(), set())
    assert worker.take_failed_blocks() == set()
    assert worker.tally.counts == {"loaded_bytes": 12, "loaded_tokens": 12}


@pytest.mark.parametrize("what", ["load", "store"])
def test_a_transfer_that_is_done_when_it_is_submitted_is_timed(what: str) -> None:
    clock = Clock()

    def copied() -> Future[LoadOutcome]:
        clock.now += 0.25
        return Future.resolved(LoadOutcome(True))

    worker = WorkerSide(FakeInstance(copied), block_size=BLOCK, clock=clock)
    worker.load(StepPlan(loads=[LOAD] if what == "load" else []))
    worker.store(StepPlan(stores=[store()] if what == "store" else []))
    assert worker.tally.take()["seconds"] == {what: [0.25]}


@pytest.mark.parametrize(
    # The first block was vLLM's own. A block size of 0 stands for several groups.
    ("block_size", "requests", "blocks"),
    [(BLOCK, set(), {2, 3, 4}), (0, {"a"}, set())],
)
def test_a_failed_load_is_told_by_the_blocks_that_it_was_to_fill_or_by_its_request(
    block_size: int, requests: set[str], blocks: set[int]
) -> None:
    worker = WorkerSide(answers(False), block_size=block_size)
    worker.load(StepPlan(loads=[LOAD]))
    assert worker.finished_loads() == ({"a"}, requests)
    assert worker.take_failed_blocks() == blocks
    assert worker.take_failed_blocks() == set()
    report = worker.take_report()
    assert (report.failed, report.loaded) == ({"a"}, {"a": 1})


def test_a_synchronous_load_is_over_when_the_step_begins() -> None:
    clock = Clock()
    future: Promise[LoadOutcome] = Promise()
    worker = WorkerSide(answers(future), block_size=BLOCK, clock=clock)

    def copied() -> None:
        clock.now += 0.25
        future.set_result(LoadOutcome(True))

    threading.Timer(0.05, copied).start()
    worker.load(StepPlan(loads=[replace(LOAD, is_within=True)]))
    assert future.query()
    assert worker.finished_loads() == (set(), set())
    report = worker.take_report()
    assert report.loaded == {"a": 1}
    assert (report.copied_tokens, report.copied_s) == (LOAD.tokens, 0.25)


def test_loads_within_the_step_and_between_steps_are_in_one_plan() -> None:
    later: Promise[LoadOutcome] = Promise()
    instance = FakeInstance()
    instance.load = lambda ops, *, in_pieces=False: [
        later if in_pieces else Future.resolved(LoadOutcome(True)) for _ in ops
    ]
    worker = WorkerSide(instance, block_size=BLOCK)
    worker.load(StepPlan(loads=[LOAD, replace(LOAD, request_id="b", is_within=True)]))
    assert worker.take_report().loaded == {"b": 1}
    assert worker.finished_loads() == (set(), set())
    later.set_result(LoadOutcome(True))
    assert worker.finished_loads() == ({"a"}, set())


def test_what_a_step_computed_from_a_failed_load_is_not_stored() -> None:
    instance = answers(False, True)
    worker = WorkerSide(instance, block_size=BLOCK)
    worker.before_step(StepPlan())
    worker.load(StepPlan(loads=[replace(LOAD, is_within=True)]))
    worker.store(StepPlan(stores=[store(3, start=16), store(4, "b", 8)]))
    assert not instance.stores
    report = worker.take_report()
    assert report.unstored == {"a": 16, "b": 8}
    assert report.ended == {3: 1, 4: 1}
    worker.before_step(StepPlan())
    worker.store(StepPlan(stores=[store(5)]))
    assert [op.number for op in instance.stores] == [5]


def test_a_load_between_steps_that_fails_spoils_nothing() -> None:
    instance = answers(False, True)
    worker = WorkerSide(instance, block_size=BLOCK)
    worker.load(StepPlan(loads=[LOAD]))
    worker.store(StepPlan(stores=[store(request_id="b")]))
    assert instance.stores


def test_a_store_is_ended_before_its_blocks_are_written() -> None:
    cancelled = threading.Event()
    future: Promise[LoadOutcome] = Promise(cancelled.set)
    other: Promise[LoadOutcome] = Promise(pytest.fail)
    worker = WorkerSide(answers(future, other), block_size=BLOCK)
    worker.store(StepPlan(stores=[store(0), store(1)]))
    assert worker.take_report().ended == {}

    def server() -> None:
        cancelled.wait(60)
        future.set_result(LoadOutcome(False))

    thread = threading.Thread(target=server)
    thread.start()
    worker.before_step(StepPlan(fence=[0, 7]))
    assert future.query(), "the fence waits until the server touches the blocks no more"
    assert not other.query()
    thread.join()
    assert worker.take_report().ended == {0: 1}
    assert (worker.tally.counts["cancelled_stores"], worker.tally.counts["failed_stores"]) == (1, 1)


@pytest.mark.parametrize("what", ["load", "store"])
def test_a_steps_transfers_are_one_batch_of_which_a_bad_one_fails_alone(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    batches: list[int] = []

    class Instance(FakeInstance):
        def checked(self, ops: Sequence[TransferOp]) -> None:
            batches.append(len(ops))
            if any(op.request_id == "b" for op in ops):
                raise BadBlockIds("block 9 of 4")

        def load(self, ops: Sequence[TransferOp], *, in_pieces: bool = False) -> list[Future[Any]]:
            self.checked(ops)
            return super().load(ops, in_pieces=in_pieces)

        def store(self, ops: Sequence[TransferOp]) -> list[Future[Any]]:
            self.checked(ops)
            return super().store(ops)

    worker = WorkerSide(Instance(), block_size=BLOCK)
    loads = [LOAD, replace(LOAD, request_id="b", block_ids=[[7, 8, 9, 10]]), replace(LOAD, request_id="c")]
    stores = [store(0), store(1, "b"), store(2, "c")]
    worker.load(StepPlan(loads=loads if what == "load" else []))
    worker.store(StepPlan(stores=stores if what == "store" else []))
    assert batches == [3, 1, 1, 1]
    assert worker.tally.counts["errors"] == 1
    assert "block 9 of 4" in caplog.text
    report = worker.take_report()
    if what == "load":
        assert (report.failed, report.loaded) == ({"b"}, {"a": 1, "b": 1, "c": 1})
        assert worker.take_failed_blocks() == {8, 9, 10}
    else:
        assert (report.ended, report.stored) == ({0: 1, 1: 1, 2: 1}, {0: 1, 1: 0, 2: 1})


def test_the_scheduler_is_told_who_serves_whenever_it_changes() -> None:
    instance = FakeInstance()
    instance.served = None
    worker = WorkerSide(instance, worker=3, block_size=BLOCK)
    assert worker.take_report().served == {3: None}
    assert not worker.take_report()
    instance.served = SERVED
    assert worker.take_report().served == {3: SERVED}
    assert not worker.take_report()


@pytest.mark.parametrize("is_within", [True, False])
def test_a_load_that_the_scheduler_could_not_name_fails(is_within: bool) -> None:
    instance = answers()
    worker = WorkerSide(instance, block_size=BLOCK)
    worker.load(StepPlan(loads=[replace(LOAD, digests=b"", is_within=is_within)]))
    assert worker.finished_loads() == (set() if is_within else {"a"}, set())
    assert worker.take_failed_blocks() == {2, 3, 4}
    assert worker.take_report().failed == {"a"}
    assert not instance.loads


class Surprising(Promise[LoadOutcome]):
    """Of a plugin that breaks its contract."""

    def cancel(self) -> bool:
        raise RuntimeError("no cancel here")

    def exception(self) -> Exception | None:
        raise RuntimeError("no exception here")


def test_a_future_that_raises_is_a_failed_transfer() -> None:
    future = Surprising()
    worker = WorkerSide(answers(future, Future.resolved(LoadOutcome(True))), block_size=BLOCK)
    worker.load(StepPlan(loads=[LOAD, replace(LOAD, request_id="b")]))
    future.set_result(LoadOutcome(True))
    assert worker.finished_loads() == ({"a", "b"}, set())
    assert worker.take_failed_blocks() == {2, 3, 4}
    storing = Surprising()
    worker = WorkerSide(answers(storing), block_size=BLOCK)
    worker.store(StepPlan(stores=[store()]))
    threading.Timer(0.05, storing.set_result, [LoadOutcome(True)]).start()
    worker.close()


def test_a_worker_with_the_same_kv_as_another_stores_nothing_and_says_so() -> None:
    instance = FakeInstance()
    worker = WorkerSide(instance, stores=False, block_size=BLOCK)
    worker.store(StepPlan(stores=[store(5)]))
    worker.load(StepPlan(loads=[LOAD]))
    assert not instance.stores
    assert instance.loads
    assert worker.take_report().ended == {5: 1}
    assert worker.tally.counts["stored_bytes"] == 0


def test_reports_of_several_workers_are_one() -> None:
    reports = []
    for index, ok in enumerate([True, False]):
        worker = WorkerSide(answers(ok, True), worker=index, block_size=BLOCK)
        worker.load(StepPlan(loads=[LOAD]))
        worker.store(StepPlan(stores=[store(2)]))
        worker.finished_loads()
        reports.append(worker.take_report())
    merged = reports[0].merge(reports[1])
    assert merged.served == {0: SERVED, 1: SERVED}
    assert (merged.loaded, merged.ended, merged.failed) == ({"a": 2}, {2: 2}, {"a"})
    assert StepReport(unstored={"a": 8, "b": 1}).merge(StepReport(unstored={"a": 4})).unstored == {"a": 4, "b": 1}
