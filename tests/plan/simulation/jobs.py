"""What a controller gives to one of its storage threads, step by step: without the thread. It may be passed over, and
breaks the world where something unforeseen is raised."""

from __future__ import annotations

from functools import partial

from kvframework.errors import TierError
from kvframework.storage.l2.steps import Controller, Step, Steps
from tests.plan.simulation.model import Broken


class Job:
    """`take` takes the step that is due (a call to a tier, something in L1), `go_on` hands its answer to the
    controller, which names the next. Between the two, and before each, anything may happen: that is when a thread
    would wait. `step` is the one that is due, if any, and `error` what the last one raised."""

    def __init__(self, controller: Controller, steps: Steps[None]) -> None:
        self.controller = controller
        self.ended = False
        self.step: Step | None = None
        self.error: Exception | None = None
        self._steps = steps
        self._answer: object = None
        self._began = False

    def take(self) -> None:
        step, self.step = self.step, None
        assert step is not None
        try:
            self._answer = step()
        except Exception as error:  # noqa: BLE001  the controller decides
            self.error = error

    def go_on(self) -> None:
        """Raises what the controller raises, which is a bug of it."""
        answer, error = self._answer, self.error
        self._answer = self.error = None
        try:
            if error is not None:
                self.step = self._steps.throw(error)
            elif self._began:
                self.step = self._steps.send(answer)
            else:
                self._began = True
                self.step = next(self._steps)
        except StopIteration:
            self.ended = True

    def abandon(self) -> None:
        """End it where it is, as if its process had ended."""
        self._steps.close()


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
