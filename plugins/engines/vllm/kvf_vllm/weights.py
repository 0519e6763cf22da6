"""Weights that change in a running engine: what a worker knows of its own, and the scheduler of all workers'. Pure.

An update is noticed in the workers, and the scheduler hears of it after their next step. Until then it plans for the
weights from before, and the workers refuse. Blocks in vLLM's memory may be from before the update until vLLM has reset
its prefix cache: steps that write KV are numbered, and an update and a reset each name the last one before it.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvf_vllm.step_messages import StepPlan, Weights
from kvframework.api.futures import Future


class WorkerWeights:
    """The weights of one worker. For its thread."""

    def __init__(self) -> None:
        self._now = Weights()
        self._step = 0
        self._naming: Future[bool] | None = None

    def change(self) -> None:
        """An update begins."""
        self._now = Weights(self._now.updates + 1, self._step, None)
        self._naming = None

    def changed(self, naming: Future[bool]) -> None:
        """The update has ended; `naming` will say whether the weights have a name that other engines know."""
        self._naming = naming

    def begin_step(self, plan: StepPlan) -> None:
        self._step = max(self._step, plan.step)

    def fit(self, worker: int, plan: StepPlan) -> bool:
        """True if the plan was made for just these weights."""
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

    def heard(self, news: Mapping[int, Weights]) -> None:
        self._heard.update(news)

    def cache_was_reset(self, step: int) -> None:
        """vLLM holds no KV of this step or an earlier one."""
        self._clean_after = step

    @property
    def updates(self) -> dict[int, int]:
        """The number of updates of each worker that had any."""
        return {worker: each.updates for worker, each in self._heard.items()}

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
