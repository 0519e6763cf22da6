"""What the storage threads do elsewhere, step by step: one job is what one controller was given to do."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvframework.errors import TierError
from kvframework.storage.l2.steps import Steps
from kvframework.storage.l2.threads import Controller
from tests.simulation.model import Broken


class Job:
    """`take` does the step that is due (a call to a tier, something in L1), `go_on` hands its answer to the
    controller, which names the next. Between the two, and before each, anything may happen."""

    def __init__(self, controller: Controller, steps: Steps[None]) -> None:
        self.controller = controller
        self.ended = False
        self.since = 0.0
        # How many turns it is passed over.
        self.delay = 0
        self._steps = steps
        self._step: partial[Any] | None = None
        self._answer: object = None
        self._error: Exception | None = None
        self._began = False

    @property
    def due(self) -> str:
        """The name of the step that was not taken yet; "" if its answer waits to be handed on."""
        return "" if self._step is None else self._step.func.__name__

    def take(self) -> None:
        step, self._step = self._step, None
        assert step is not None
        try:
            self._answer = step()
        except (TierError, ValueError) as error:
            self._error = error
        except Exception as unexpected:
            raise Broken(f"{step} failed: {unexpected!r}") from unexpected

    def go_on(self, now: float) -> None:
        answer, error = self._answer, self._error
        self._answer = self._error = None
        self.since = now
        try:
            if error is not None:
                step = self._steps.throw(error)
            elif self._began:
                step = self._steps.send(answer)
            else:
                self._began = True
                step = next(self._steps)
        except StopIteration:
            self.ended = True
        except Exception as unexpected:
            raise Broken(f"{self.controller.name} failed: {unexpected!r}") from unexpected
        else:
            assert isinstance(step, partial)
            self._step = step

    def abandon(self) -> None:
        """The process is gone."""
        self._steps.close()
