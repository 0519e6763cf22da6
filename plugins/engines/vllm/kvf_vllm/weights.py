"""Weights that change in a running engine: what a worker knows of its own, the scheduler of all workers', and the calls
by which vLLM updates them or resets its prefix cache. vLLM tells its connectors of neither, so the methods are watched.

An update is noticed in the workers, and the scheduler hears of it after their next step. Until then it plans for the
weights from before, and the workers refuse. Blocks in vLLM's memory may be from before the update until vLLM has reset
its prefix cache: steps that write KV are numbered, and an update and a reset each name the last one before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvf_vllm.step_messages import StepPlan, Weights
from kvframework.api.futures import Future
from kvframework.client import WatchedCall, watch_calls


class WorkerWeights:
    """The weights of one worker. For its thread."""

    def __init__(self) -> None:
        self._now = Weights()
        self._step = 0
        self._naming: Future[bool] | None = None

    def change(self) -> None:
        self._now = Weights(self._now.updates + 1, self._step, None)
        self._naming = None

    def changed(self, naming: Future[bool]) -> None:
        """The update has ended; `naming` will say whether the weights have a name that other engines know."""
        self._naming = naming

    def begin_step(self, plan: StepPlan) -> None:
        self._step = max(self._step, plan.step)

    def fit(self, worker: int, plan: StepPlan) -> bool:
        return self.now.is_shared is not None and plan.updates.get(worker, 0) == self._now.updates

    @property
    def now(self) -> Weights:
        if self._naming is not None and self._naming.query():
            naming, self._naming = self._naming, None
            self._now = self._now._replace(is_shared=naming.exception() is None and naming.result(0))
        return self._now


class EngineWeights:
    """The weights of all workers, as far as the scheduler has heard. `caches_prefixes`: vLLM has a prefix cache."""

    def __init__(self, *, caches_prefixes: bool = True) -> None:
        self._caches_prefixes = caches_prefixes
        self._heard: dict[int, Weights] = {}
        self._clean_after = 0
        # The number of updates of each worker that had any.
        self.updates: Mapping[int, int] = {}

    def heard(self, news: Mapping[int, Weights]) -> None:
        self._heard.update(news)
        self.updates = {worker: each.updates for worker, each in self._heard.items()}

    def cache_was_reset(self, step: int) -> None:
        """vLLM holds no KV of this step or an earlier one."""
        self._clean_after = step

    @property
    def are_changing(self) -> bool:
        """True as long as an update is under way, or the name of what it has brought is looked for."""
        return any(each.is_shared is None for each in self._heard.values())

    @property
    def are_shared(self) -> bool:
        """True if the name of the weights is one that other engines know."""
        return all(each.is_shared for each in self._heard.values())

    @property
    def are_alone(self) -> bool:
        """True if no KV of other weights can be in vLLM's blocks, but for requests that have blocks now."""
        last = max((each.step for each in self._heard.values()), default=0)
        return not self.are_changing and (not self._caches_prefixes or self._clean_after >= last)


# After the connector is made, and before the first request.
_STARTS = "compile_or_warm_up_model"
_OF_WORKER = (
    "load_model",
    "reload_weights",
    "start_draft_weight_update",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)
_OF_RUNNER = ("load_model", "reload_weights")


class WeightUpdates:
    """The updates of one worker. `begins` is called before each, `ends` after it, with the time since the epoch at
    which it began if all weights are those of the model's files now, else None. While an update takes several calls it
    does not end."""

    def __init__(self, config: Any, *, begins: Callable[[], None], ends: Callable[[float | None], None]) -> None:
        self._parallel = config.parallel_config
        self._begins = begins
        self._ends = ends
        # None until vLLM has loaded the model.
        self._worker: Any = None
        self._depth = 0
        self._loaded: set[str] = set()
        # No call gives a draft model its files' weights back.
        self._is_draft_known = True

    @property
    def is_following(self) -> bool:
        return self._worker is not None

    def watch(self, worker_class: type) -> None:
        """Follow the worker of this class that has this configuration. Raises `AttributeError` for a class that is not
        as expected."""
        watch_calls(worker_class, (_STARTS,), self)

    @contextmanager
    def around(self, call: WatchedCall) -> Iterator[None]:
        subject = call.args[0]
        if call.name == _STARTS:
            if getattr(subject.vllm_config, "parallel_config", None) is self._parallel:
                self._follow(subject)
            yield
        elif self._worker is None or not any(subject is each for each in self._subjects()):
            yield
        else:
            yield from self._update(call)

    def _update(self, call: WatchedCall) -> Iterator[None]:
        is_outermost, started = not self._depth, time.time()
        wanted: set[str] | None = None
        if is_outermost:
            self._begins()
            self._loaded = set()
            if call.name == "reload_weights" and call.argument(1, "weights_iterator") is None:
                # As vLLM counts them.
                names = (name for name, _ in self._worker.get_model().named_parameters())
                wanted = {name.replace(".base_layer.", ".") for name in names}
        self._depth += 1
        is_done = False
        try:
            yield
            is_done = True
        finally:
            self._depth -= 1
            if call.name == "load_weights" and call.args[0] is self._worker.get_model():
                self._loaded |= call.result or set()
            if call.name == "start_draft_weight_update" or call.args[0] is self._worker.get_draft_model():
                self._is_draft_known = False
            if is_outermost and not getattr(self._worker, "_weight_update_active", False):
                is_whole = is_done and self._is_draft_known and wanted is not None and wanted <= self._loaded
                self._ends(started if is_whole else None)

    def _subjects(self) -> list[Any]:
        worker = self._worker
        return [worker, worker.model_runner, worker.get_model(), worker.get_draft_model()]

    def _follow(self, worker: Any) -> None:
        self._worker = worker
        for subject, names in (
            (worker, _OF_WORKER),
            (worker.model_runner, _OF_RUNNER),
            (worker.get_model(), ("load_weights",)),
            (worker.get_draft_model(), ("load_weights",)),
        ):
            watch_calls(type(subject), [name for name in names if hasattr(type(subject), name)], self)


class CacheResets:
    """The resets of one vLLM engine's prefix cache; `then` is called after each that has emptied it."""

    def __init__(self, manager: Any, then: Callable[[], None]) -> None:
        self._manager = manager
        self._then = then
        watch_calls(type(manager), ("reset_prefix_cache",), self)

    @contextmanager
    def around(self, call: WatchedCall) -> Iterator[None]:
        yield
        if call.args[0] is self._manager and call.result:
            self._then()
