"""What a controller gives to one of its storage threads, under the hand of the simulation. It may be passed over, and
breaks the world where something unforeseen is raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kvf_plan.simulation.threads import VirtualThread
from kvframework.errors import TierError
from kvframework.storage.l2.tiers import Controller, Work
from tests.plan.simulation.model import Broken

P = ParamSpec("P")
R = TypeVar("R")


class Turns:
    """What has the turn: a job, or, for None, anything else."""

    def __init__(self) -> None:
        self.job: Job | None = None

    def step(self, due: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, in a job only once that is its next step, `due`, and with a pause behind it: anything may
        happen in between, as if its thread waited."""
        return function(*args, **kwargs) if self.job is None else self.job.step(due, function, *args, **kwargs)


class Job:
    """`go_on` takes the step that is `due` (a call to a tier, something in L1), or goes to the next one if that is "".
    `delay` is how many turns it is passed over."""

    def __init__(self, controller: Controller, work: Work, turns: Turns) -> None:
        self.controller = controller
        self.ended = False
        self.due = ""
        self.delay = 0
        self._turns = turns
        self._broken: Broken | None = None
        self._thread = VirtualThread(controller.name, lambda: None)
        self._thread.begin(lambda: self._run(work))

    def go_on(self) -> None:
        """Raises `Broken` if the controller raises anything, or a step raises what is no failure of a tier."""
        self._turns.job = self
        self.ended = self._thread.resume() is None
        self._turns.job = None
        if self.ended or self._broken is not None:
            self._thread.end()
        if self._broken is not None:
            raise self._broken

    def step(self, due: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        self.due = due
        self._thread.sleep(0.0)
        self.due = ""
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, (TierError, ValueError)):
                self._broken = Broken(f"{due} failed: {error!r}")
            self._thread.sleep(0.0)
            raise
        self._thread.sleep(0.0)
        return result

    def abandon(self) -> None:
        self._thread.end()

    def _run(self, work: Work) -> None:
        try:
            work()
        except Broken as broken:
            self._broken = self._broken or broken
        except Exception as error:  # noqa: BLE001  a bug of the controller
            self._broken = self._broken or Broken(f"{self.controller.name} failed: {error!r}")
