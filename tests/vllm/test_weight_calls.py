"""vLLM's calls that change weights, as its classes make them, and what follows in the worker and the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvf_vllm.step_messages import StepPlan, StepReport, TransferOp
from kvf_vllm.weights import WeightUpdates
from kvf_vllm.worker import WorkerSide
from kvframework.api.futures import Future, Promise
from kvframework.api.transport import LoadOutcome
from tests.vllm.stand_ins import BLOCK, SERVED, FakeInstance, FakeRequest, computed, scene, table

LOAD = TransferOp("a", 0, 16, b"d" * 64, "", [[1, 2, 3, 4]], skip=4)
STORE = TransferOp("b", 0, 8, b"", "", [[5, 6]])


class Model:
    def load_weights(self, weights: Any) -> Any:
        if weights == ["bad"]:
            raise RuntimeError("no such weight")


class Draft(Model):
    pass


class Runner:
    def __init__(self) -> None:
        self.model = Model()

    def reload_weights(self, weights: Any = ()) -> None:
        self.model.load_weights(weights)


class Worker:
    """With vLLM's methods."""

    def __init__(self) -> None:
        self.vllm_config, self.model_runner, self.draft = SimpleNamespace(parallel_config=object()), Runner(), Draft()

    def get_model(self) -> Model:
        return self.model_runner.model

    def get_draft_model(self) -> Draft:
        return self.draft

    def compile_or_warm_up_model(self) -> str:
        return "compiled"

    def reload_weights(self, weights: Any = ()) -> None:
        self.model_runner.reload_weights(weights)

    def start_weight_update(self) -> None: ...

    def start_draft_weight_update(self) -> None: ...

    def update_weights(self, info: Any) -> None:
        self.get_model().load_weights(info)


CALLS: list[Callable[[Any], Any]] = [
    lambda worker: worker.reload_weights(),
    lambda worker: worker.model_runner.reload_weights(),
    lambda worker: worker.get_model().load_weights(["w"]),
    lambda worker: worker.get_draft_model().load_weights(["w"]),
    lambda worker: worker.start_weight_update(),
    lambda worker: worker.start_draft_weight_update(),
    lambda worker: worker.update_weights(["w"]),
]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_this_engine_that_changes_weights_is_seen(call: Callable[[Any], Any]) -> None:
    told: list[str] = []
    worker, other = Worker(), Worker()
    updates = WeightUpdates(worker.vllm_config, lambda: told.append("begins"))
    updates.watch(Worker)
    # Before vLLM's start is over, and in another engine of this process, nobody listens.
    worker.get_model().load_weights(["w"])
    assert [each.compile_or_warm_up_model() for each in (other, worker)] == ["compiled"] * 2
    call(other)
    assert (told, updates.is_following) == ([], True)
    call(worker)
    assert set(told) == {"begins"}
    with pytest.raises(RuntimeError, match="no such weight"):
        worker.reload_weights(["bad"])


def test_transfers_under_way_end_when_the_update_begins_and_none_begins_after_it() -> None:
    cancelled: list[str] = []
    loading: Promise[LoadOutcome] = Promise(lambda: (cancelled.append("load"), loading.set_result(LoadOutcome(False))))
    storing: Promise[LoadOutcome] = Promise(lambda: (cancelled.append("store"), storing.set_result(LoadOutcome(False))))
    futures = [loading, storing]
    instance = FakeInstance(lambda: futures.pop(0))
    worker = WorkerSide(instance, block_size=BLOCK)
    worker.load(StepPlan(loads=[LOAD]))
    # This one has been copied, and vLLM has not been told.
    worker._loading["b"] = replace(LOAD, request_id="b"), Future.resolved(LoadOutcome(True)), 0.0
    worker.store(StepPlan(stores=[STORE]))
    worker.weights_change()
    assert cancelled == ["load", "store"]
    report = worker.take_report()
    assert (report.updated, report.ended) == (True, {0: 1})
    worker.finished_loads()
    assert worker.take_report().failed == {"a", "b"}
    worker.load(StepPlan([LOAD]))
    worker.store(StepPlan(stores=[replace(STORE, number=1)]))
    assert worker.finished_loads()[0] == {"a"}
    report = worker.take_report()
    assert (report.updated, report.failed, report.unstored, report.ended) == (False, {"a"}, {"b": 0}, {1: 1})
    assert (len(instance.loads), len(instance.stores)) == (1, 1)


def test_the_scheduler_looks_nothing_up_and_stores_nothing_once_it_has_heard() -> None:
    server, side, running = scene(16, held=32)
    side.matched_tokens(running, 0)
    side.heard(StepReport(served={0: SERVED}).merge(StepReport(updated=True)))
    assert not computed(side, running, 16).stores
    for request in (FakeRequest("b", list(range(16))), running):
        asked = len(server.asked)
        assert side.matched_tokens(request, 0) == (0, False)
        assert len(server.asked) == asked
        side.allocated(request, table(16), 0)
        assert not computed(side, request, 16).stores
    assert not server.tickets
    assert side.tally.counts["miss_requests|weights_changed"] == 2
    # A server that comes back changes nothing.
    side.heard(StepReport(served={0: None}))
    side.heard(StepReport(served={0: SERVED}))
    assert side.matched_tokens(FakeRequest("c", list(range(16))), 0) == (0, False)
