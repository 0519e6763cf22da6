"""The scheduler's knowledge of the names of its engine's KV: what the workers have registered, and whether their
weights are still those that the names stand for. Pure."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from kvf_vllm.requests import Asking
from kvf_vllm.step_messages import Served, Weights
from kvf_vllm.weights import EngineWeights

log = logging.getLogger(__name__)


class WorkerNews(Protocol):
    """The part of the workers' report that is about names, see `StepReport`."""

    @property
    def served(self) -> Mapping[int, Served | None]: ...
    @property
    def weights(self) -> Mapping[int, Weights]: ...


class EngineNames:
    """The names of `workers`; `serve` is called with those of all stages whenever they change. `served` is the first
    stage's, None while no name holds. `generation` is a salt for KV that no other engine and no earlier request may
    find, "" for none."""

    def __init__(self, workers: int, weights: EngineWeights, serve: Callable[[Sequence[Served]], None]) -> None:
        self.served: Served | None = None
        self.generation = ""
        self.weights = weights
        # The last planned step that writes KV.
        self.step = 0
        self._updated_at = -1
        self._is_up_to_date = True
        self._workers = workers
        self._serve = serve
        self._heard: dict[int, Served | None] = {}
        self._serving: Sequence[tuple[Served, tuple[int, ...]]] = ()
        self._differ = False

    @property
    def have_come(self) -> bool:
        """True once each worker has reported whether it has a server."""
        return len(self._heard) == self._workers

    @property
    def why_none(self) -> str:
        if not self.weights.are_alone:
            return "weights_changed"
        return "workers_differ" if self._differ else "no_server"

    def hide(self) -> None:
        """Hide the KV that this engine has computed so far. There is none since an update whose news came before the
        reset, so that what others have stored under the new names is still found."""
        if self.step != self._updated_at:
            self.generation = secrets.token_hex(8)

    def heard(self, report: WorkerNews) -> bool:
        """Apply the workers' news. Returns True if weights were updated: KV from before has another name."""
        if not (report.served or report.weights):
            return False
        self._heard.update(report.served)
        is_updated = self._hear_of_weights(report.weights)
        self._learn()
        return is_updated

    def planned(self, *, writes: bool) -> None:
        """A step was planned, whose report has the workers' news."""
        self.step += writes
        self._is_up_to_date = True

    def are_awaited(self, asking: Asking) -> bool:
        """True once for each request while the next step may bring news of the workers' weights."""
        if asking.was_asked_again or (self._is_up_to_date and not self.weights.are_changing):
            return False
        asking.was_asked_again = asking.wish.load or asking.wish.store
        return asking.was_asked_again

    def cache_was_reset(self) -> bool:
        """vLLM has emptied its own prefix cache. Returns True if that was missing. Often the weights were updated just
        before, so the next requests wait a step for the workers' word."""
        was_alone, self._is_up_to_date = self.weights.are_alone, False
        self.weights.cache_was_reset(self.step)
        if not was_alone:
            self._learn()
        return not was_alone

    def follow_versions(self, core: type, manager: Any) -> None:
        """Follow the engine core of this class that has this manager of KV."""
        self.weights.follow_versions(core, manager, self.version_was_announced)

    def version_was_announced(self) -> None:
        """The engine has announced a version of its weights, maybe after their news."""
        if self.weights.updates and not self.weights.are_changing and not self.weights.are_shared:
            self.generation = self.weights.version_salt or self.generation

    def _hear_of_weights(self, news: Mapping[int, Weights]) -> bool:
        """What is named by files is shared again; what is not has a name that no other engine has, for as long as these
        weights stay."""
        before, were_changing = self.weights.updates, self.weights.are_changing
        self.weights.heard(news)
        is_updated = self.weights.updates != before
        if is_updated:
            # Whatever was hidden so far has another name than what comes.
            self.generation, self.served, self._updated_at = "", None, self.step
            log.info("the engine's weights were updated: KV of the old weights is neither loaded nor stored")
        if (were_changing or is_updated) and not self.weights.are_changing:
            if not self.weights.are_shared:
                self.generation = self.weights.version_salt or secrets.token_hex(16)
            if not self.weights.are_alone:
                log.warning(
                    "vLLM loads and stores no KV until its prefix cache, which holds KV of the old weights, is reset"
                )
        return is_updated

    def _learn(self) -> None:
        """Take the names that hold from now on. None do while workers disagree, or KV of other weights may lie in
        vLLM's blocks; they stay while a worker has no server."""
        names = self._agreed() if self.weights.are_alone else ()
        if names or self._differ or not self.weights.are_alone:
            self.served = names[0] if names else None
        # Two registrations by one name are equal.
        serving = [(each, each.instances) for each in names]
        if names and serving != self._serving:
            self._serving = serving
            self._serve(names)

    def _agreed(self) -> Sequence[Served]:
        """Those of all stages, in order; none as long as not all workers have said the same."""
        known = {each for each in self._heard.values() if each is not None}
        stages = {each.stage: each for each in known}
        self._differ = len(known) > len(stages) or len({each.chunk_tokens for each in known}) > 1
        if self._differ:
            log.error("vLLM loads and stores no KV, because its workers name their KV differently: %s", known)
        if self._differ or not self.have_come or None in self._heard.values():
            return ()
        return [self._of_all_ranks(stages[stage]) for stage in sorted(stages)]

    def _of_all_ranks(self, stage: Served) -> Served:
        workers = [self._heard[worker] for worker in sorted(self._heard)]
        return replace(stage, instances=tuple(own for each in workers if each == stage for own in each.instances))
