"""vLLM's calls that change weights, as its classes make them, and what follows in the worker: transfers under way, the
name, the registration."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvf_vllm.identity import Named, identify
from kvf_vllm.step_messages import StepPlan, StepReport, TransferOp, Weights
from kvf_vllm.weights import CacheResets, WeightUpdates
from kvf_vllm.worker import WorkerSide
from kvframework.api.futures import Future, Promise
from kvframework.api.transport import LoadOutcome
from kvframework.client import ModelFacts, model_files
from kvframework.errors import ConfigFieldError
from tests.vllm.stand_ins import BLOCK, FakeInstance, FakeRequest, FakeServer, scheduler

LOAD = TransferOp("a", 0, 16, b"d" * 64, "", [[1, 2, 3, 4]], skip=4)
STORE = TransferOp("b", 0, 8, b"", "", [[5, 6]])


def vllm_of(*names: str) -> tuple[Any, Any, list[Any]]:
    """A worker with vLLM's methods, which has started, and what is told of it. `names`: the parameters of its model."""

    class Model:
        def named_parameters(self) -> list[tuple[str, None]]:
            return [(name, None) for name in names]

        def load_weights(self, weights: Any) -> Any:
            if weights == ["bad"]:
                raise RuntimeError("no such weight")
            return set(weights)

    class Draft(Model):
        pass

    class Runner:
        def __init__(self) -> None:
            self.model = Model()

        def reload_weights(
            self, weights_iterator: Any = None, weights_path: Any = None, is_checkpoint_format: bool = True
        ) -> None:
            if is_checkpoint_format:
                self.model.load_weights(weights_iterator or weights_path or names)

    class Worker:
        def __init__(self, config: Any) -> None:
            self.vllm_config, self.model_runner = config, Runner()
            self.draft, self._weight_update_active = Draft(), False

        def get_model(self) -> Model:
            return self.model_runner.model

        def get_draft_model(self) -> Draft:
            return self.draft

        def compile_or_warm_up_model(self) -> str:
            return "compiled"

        def reload_weights(self, *args: Any, **kwargs: Any) -> None:
            self.model_runner.reload_weights(*args, **kwargs)

        def start_weight_update(self) -> None:
            self._weight_update_active = True

        def update_weights(self, info: Any) -> None:
            if info == ["bad"]:
                self._weight_update_active = False
            self.get_model().load_weights(info)

        def finish_weight_update(self) -> None:
            self._weight_update_active = False

        def start_draft_weight_update(self) -> None:
            self._weight_update_active = True

    told: list[Any] = []
    config = SimpleNamespace(parallel_config=object())
    updates = WeightUpdates(
        config,
        begins=lambda: told.append("begins"),
        ends=lambda began: told.append("tensors" if began is None else "files"),
    )
    updates.watch(Worker)
    worker, other = Worker(config), Worker(SimpleNamespace(parallel_config=object()))
    # Before vLLM's start is over, and in another engine of this process, nobody listens.
    worker.get_model().load_weights(["w"])
    assert [each.compile_or_warm_up_model() for each in (other, worker)] == ["compiled"] * 2
    other.reload_weights()
    assert told == []
    assert updates.is_following
    worker.keeps = updates
    return worker, other, told


CALLS: list[tuple[Callable[[Any], Any], list[str]]] = [
    (lambda worker: worker.reload_weights(), ["files"]),
    (lambda worker: worker.model_runner.reload_weights(weights_path=["w", "v", "x"]), ["files"]),
    (lambda worker: worker.reload_weights(weights_path=["w"]), ["tensors"]),
    (lambda worker: worker.reload_weights(weights_iterator=["w", "v"]), ["tensors"]),
    (lambda worker: worker.reload_weights(["w", "v"]), ["tensors"]),
    (lambda worker: worker.reload_weights(is_checkpoint_format=False), ["tensors"]),
    (lambda worker: worker.get_model().load_weights(["w", "v"]), ["tensors"]),
    (lambda worker: worker.get_draft_model().load_weights(["w", "v"]), ["tensors"]),
]


@pytest.mark.parametrize(("call", "ends"), CALLS)
def test_a_call_begins_and_ends_once(call: Callable[[Any], Any], ends: list[str]) -> None:
    worker, other, told = vllm_of("w", "v.base_layer.x".removesuffix(".base_layer.x"))
    call(other)
    assert told == []
    call(worker)
    assert told == ["begins", *ends]


def test_adapters_do_not_count_among_the_weights_of_files() -> None:
    worker, _, told = vllm_of("q.base_layer.weight")
    worker.reload_weights(weights_path=["q.weight"])
    assert told == ["begins", "files"]


def test_an_update_of_several_calls_ends_with_the_last() -> None:
    worker, _, told = vllm_of("w")
    worker.start_weight_update()
    worker.update_weights(["w"])
    assert told == ["begins"] * 2
    worker.finish_weight_update()
    assert told == ["begins"] * 3 + ["tensors"]


def test_an_update_that_fails_has_ended_with_unknown_weights() -> None:
    worker, _, told = vllm_of("w")
    with pytest.raises(RuntimeError, match="no such weight"):
        worker.reload_weights(weights_path=["bad"])
    worker.start_weight_update()
    with pytest.raises(RuntimeError, match="no such weight"):
        worker.update_weights(["bad"])
    assert told == ["begins", "tensors", "begins", "begins", "tensors"]


@pytest.mark.parametrize("of_draft", [lambda worker: worker.start_draft_weight_update(), CALLS[-1][0]])
def test_files_do_not_name_an_engine_whose_draft_model_was_changed(of_draft: Callable[[Any], Any]) -> None:
    worker, _, told = vllm_of("w")
    of_draft(worker)
    worker.finish_weight_update()
    del told[:]
    worker.reload_weights()
    assert told == ["begins", "tensors"]


def test_a_reset_counts_if_it_has_emptied_the_cache_of_this_engine() -> None:
    class Manager:
        def __init__(self, answer: bool) -> None:
            self.answer = answer

        def reset_prefix_cache(self) -> bool:
            return self.answer

    done: list[str] = []
    full, other = Manager(False), Manager(True)
    keeps = CacheResets(full, lambda: done.append("reset"))
    assert (full.reset_prefix_cache(), other.reset_prefix_cache(), done) == (False, True, [])
    full.answer = True
    assert full.reset_prefix_cache()
    assert (done, keeps is not None) == (["reset"], True)


def test_transfers_under_way_end_when_the_update_begins() -> None:
    cancelled: list[str] = []
    loading: Promise[LoadOutcome] = Promise(lambda: (cancelled.append("load"), loading.set_result(LoadOutcome(False))))
    storing: Promise[LoadOutcome] = Promise(lambda: (cancelled.append("store"), storing.set_result(LoadOutcome(False))))
    futures = [loading, storing]
    worker = WorkerSide(FakeInstance(lambda: futures.pop(0)), block_size=BLOCK)
    worker.before_step(StepPlan(step=3))
    worker.load(StepPlan(loads=[LOAD], step=3))
    # This one has been copied, and vLLM has not been told.
    worker._loading["b"] = replace(LOAD, request_id="b"), Future.resolved(LoadOutcome(True)), 0.0
    worker.store(StepPlan(stores=[STORE], step=3))
    worker.weights_change()
    assert cancelled == ["load", "store"]
    report = worker.take_report()
    assert (report.weights, report.ended) == ({0: Weights(1, 3, None)}, {0: 1})
    worker.finished_loads()
    assert worker.take_report().failed == {"a", "b"}


def test_what_was_planned_for_other_weights_is_refused() -> None:
    instance = FakeInstance()
    worker = WorkerSide(instance, worker=1, block_size=BLOCK)
    naming: Promise[bool] = Promise()
    worker.weights_change()
    worker.weights_changed(naming)
    for plan in (StepPlan([LOAD], [STORE]), StepPlan([LOAD], [STORE], updates={0: 7, 1: 1})):
        worker.load(plan)
        worker.store(plan)
        assert worker.finished_loads()[0] == {"a"}
        report = worker.take_report()
        assert (report.failed, report.unstored, report.ended) == ({"a"}, {"b": 0}, {0: 1})
    naming.set_result(True)
    assert worker.take_report().weights == {1: Weights(1, 0, True)}
    worker.load(StepPlan([LOAD], [STORE], updates={1: 1}))
    worker.store(StepPlan([LOAD], [STORE], updates={1: 1}))
    assert (len(instance.loads), len(instance.stores)) == (1, 1)


def test_requests_wait_one_step_for_the_workers_word_after_a_reset() -> None:
    side = scheduler(FakeServer())
    side.cache_was_reset()
    request = FakeRequest("a", list(range(17)))
    assert side.matched_tokens(request, 0) == (None, False)
    side.plan_step({}, lambda _request_id: None)
    assert side.matched_tokens(request, 0) == (0, False)
    assert side.matched_tokens(FakeRequest("b", list(range(17))), 0) == (0, False)


def test_images_are_computed_once_weights_were_updated() -> None:
    """vLLM may still hold what the old weights have made of them."""
    side = scheduler(FakeServer())
    side.heard(StepReport(weights={0: Weights(1, 0, True)}))
    features = [SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=0, length=4))]
    side.matched_tokens(FakeRequest("a", list(range(17)), mm_features=features), 0)
    side.matched_tokens(FakeRequest("b", list(range(17))), 0)
    plan = side.plan_step({"a": 17, "b": 17}, lambda _request_id: [[1, 2, 3, 4, 5]])
    assert [op.request_id for op in plan.stores] == ["b"]


def facts(folder: Path) -> ModelFacts:
    return ModelFacts(
        str(folder), "", "", "auto", 0, {"hidden_size": 8}, "float32", {}, model_files(str(folder)), started=time.time()
    )


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = []
    for name in ("old", "new"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_text(name)
        # Long before anything started.
        os.utime(folder / "model.safetensors", (1, 1))
        made.append(folder)
    return made[0], made[1]


def test_weights_from_files_have_the_name_that_an_engine_gives_which_starts_with_them(
    folders: tuple[Path, Path],
) -> None:
    old, new = (facts(folder) for folder in folders)
    named = Named(old, identify(replace(old, started=float("inf"))))
    for each in (new, old):
        assert named.after_update(each, time.time() + 60) == identify(replace(each, started=float("inf")))
    with pytest.raises(ConfigFieldError, match="were changed in memory, not by files"):
        named.after_update(new, None)
    with pytest.raises(OSError, match=r"model\.safetensors changed after"):
        named.after_update(new, 0.0)


def test_the_users_name_for_weights_is_that_of_the_files_of_the_start(folders: tuple[Path, Path]) -> None:
    old, new = (replace(facts(folder), started=time.time() + 60) for folder in folders)
    own = {"model": "m", "weights": "first"}
    named = Named(old, identify(old, **own), **own)
    late = time.time() + 60
    other = named.after_update(new, late)
    assert other == identify(replace(new, started=float("inf")), model="m")
    assert named.after_update(old, late) == named.identity != other
    # Files that were written since the start are other ones.
    changed = Named(replace(old, started=0.0), named.identity, **own)
    assert changed.after_update(old, late) == identify(replace(old, started=float("inf")), model="m")
