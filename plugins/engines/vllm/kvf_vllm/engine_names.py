"""The scheduler's knowledge of the names of its engine's KV: what the workers have registered, and whether their
weights are still those that the names stand for. Pure."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvf_vllm.step_messages import Served, StepReport

log = logging.getLogger(__name__)


class EngineNames:
    """The names of `workers`; `serve` is called with those of all stages whenever they change. `served` is the first
    stage's, None while no name holds: as long as workers disagree, and for ever once weights were `updated`; it stays
    while a worker has no server. `generation` is a salt for KV that no other engine and no earlier request may find, ""
    for none."""

    def __init__(self, workers: int, serve: Callable[[Sequence[Served]], None]) -> None:
        self.served: Served | None = None
        self.generation = ""
        self.updated = False
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
        """The reason for which no name holds."""
        if self.updated:
            return "weights_changed"
        return "workers_differ" if self._differ else "no_server"

    def hide(self) -> None:
        """Hides all KV so far from this engine."""
        self.generation = secrets.token_hex(8)

    def heard(self, report: StepReport) -> None:
        """Applies the workers' news."""
        self._heard.update(report.served)
        self.updated = self.updated or report.updated
        if self.updated:
            self.served = None
        elif report.served:
            self._learn()

    def _learn(self) -> None:
        names = self._agreed()
        if names or self._differ:
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
            log.error("the engine's workers name their KV differently, nothing is loaded or stored: %s", known)
        if self._differ or not self.have_come or None in self._heard.values():
            return ()
        return [self._of_all_ranks(stages[stage]) for stage in sorted(stages)]

    def _of_all_ranks(self, stage: Served) -> Served:
        workers = [self._heard[worker] for worker in sorted(self._heard)]
        return replace(stage, instances=tuple(own for each in workers if each == stage for own in each.instances))
