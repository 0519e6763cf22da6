"""The storage threads without threads: what a controller gave to one of them, step by step."""

from __future__ import annotations

from kvframework.storage.l2.steps import Step, Steps
from kvframework.storage.l2.threads import Controller


class Job:
    """`take` takes the step that is due (a call to a tier, something in L1), `go_on` hands its answer to the
    controller, which names the next. Between the two, and before each, anything may happen: that is when a thread
    waits."""

    def __init__(self, controller: Controller, steps: Steps[None]) -> None:
        self.controller = controller
        self.ended = False
        self._steps = steps
        self._step: Step | None = None
        self._answer: object = None
        self._error: Exception | None = None
        self._began = False

    def take(self) -> None:
        step, self._step = self._step, None
        assert step is not None
        try:
            self._answer = step()
        except Exception as error:  # noqa: BLE001  the controller decides
            self._error = error

    def go_on(self) -> None:
        """Raises what the controller raises, which is a bug of it."""
        answer, error = self._answer, self._error
        self._answer = self._error = None
        try:
            if error is not None:
                self._step = self._steps.throw(error)
            elif self._began:
                self._step = self._steps.send(answer)
            else:
                self._began = True
                self._step = next(self._steps)
        except StopIteration:
            self.ended = True
