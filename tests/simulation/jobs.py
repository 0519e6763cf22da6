"""What the storage threads do elsewhere, step by step: a job of the simulator, which may be passed over and breaks the
world where something unforeseen is raised."""

from __future__ import annotations

from functools import partial

from kvframework.errors import TierError
from kvframework.simulation.jobs import Job
from kvframework.storage.l2.steps import Steps
from kvframework.storage.l2.threads import Controller
from tests.simulation.model import Broken


class PassedOverJob(Job):
    """`delay` is how many turns it is passed over."""

    def __init__(self, controller: Controller, steps: Steps[None]) -> None:
        super().__init__(controller, steps)
        self.delay = 0

    @property
    def due(self) -> str:
        """The name of the step that was not taken yet; "" if its answer waits to be handed on."""
        if self.step is None:
            return ""
        assert isinstance(self.step, partial)
        return self.step.func.__name__

    def take(self) -> None:
        step = self.step
        super().take()
        if self.error is not None and not isinstance(self.error, (TierError, ValueError)):
            raise Broken(f"{step} failed: {self.error!r}") from self.error

    def go_on(self) -> None:
        try:
            super().go_on()
        except Exception as unexpected:
            raise Broken(f"{self.controller.name} failed: {unexpected!r}") from unexpected
