"""The storage threads under virtual time: all of a manager's controllers, each with as many jobs at once as it would
have threads. A step takes the time that a tier says it takes, and all else none."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvf_plan.simulation.events import VirtualTime, Waiting
from kvframework.storage.l2.steps import Controller, Steps

log = logging.getLogger(__name__)
T = TypeVar("T")


class Changed(threading.Condition):
    """A controller's `changed` where there is one thread: no lock, and `noted` says that there may be work."""

    def __init__(self) -> None:
        self.noted = True

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        return

    def notify(self, n: int = 1) -> None:
        self.noted = True

    def notify_all(self) -> None:
        self.noted = True

    def wait(self, timeout: float | None = None) -> bool:
        return False

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        return predicate()


class VirtualThreads:
    """`waiting` is where a tier says until when the step that it is taking lasts."""

    def __init__(self, time: VirtualTime, controllers: Sequence[tuple[Controller, int]], waiting: Waiting) -> None:
        self._time = time
        self._controllers = controllers
        self._changed = [Changed() for _ in controllers]
        for (controller, _), changed in zip(controllers, self._changed, strict=True):
            controller.changed = changed
        self._idle = [count for _, count in controllers]
        # When each controller is asked again without another reason.
        self._asked_at = [math.inf] * len(controllers)
        self._waiting = waiting
        # So many times as late are idle controllers asked at their time: more than 1 while nothing can happen.
        self.rarely = 1.0
        # Whether any step has failed so far.
        self._failed = False

    @property
    def busy(self) -> bool:
        """Whether a job is under way."""
        return any(count < most for count, (_, most) in zip(self._idle, self._controllers, strict=True))

    def look(self) -> None:
        """Give idle threads what there is to do, after anything has happened."""
        asked: set[int] = set()
        found = True
        while found:
            found = False
            for number, changed in enumerate(self._changed):
                if changed.noted:
                    found, changed.noted = True, False
                    asked.add(number)
                    self._give(number)
        for number in sorted(asked):
            if self._idle[number]:
                self._ask_again(number, self._time.now + self.rarely * self._controllers[number][0].wait_s())

    def awake(self) -> None:
        """Ask all controllers again, no later than they say."""
        self.rarely = 1.0
        for changed in self._changed:
            changed.notify()

    def _give(self, number: int) -> None:
        controller = self._controllers[number][0]
        while self._idle[number] and (steps := controller.poll()) is not None:
            self._idle[number] -= 1
            self._drive(number, steps, None, None)

    def _ask_again(self, number: int, when: float) -> None:
        if when <= self._time.now:
            # It is due but for a rounding: after the next event.
            self._changed[number].noted = True
        elif when < self._asked_at[number]:
            self._asked_at[number] = when
            self._time.at(when, lambda: self._asked(number, when))

    def _asked(self, number: int, when: float) -> None:
        if self._asked_at[number] == when:
            self._asked_at[number] = math.inf
            self._changed[number].notify()

    def _drive(self, number: int, steps: Steps[None], answer: object, error: Exception | None) -> None:
        """Hand on the answer of the last step, and take steps until one takes time or there are no more."""
        time, take_time = self._time, self._waiting.take
        try:
            while True:
                step = steps.send(answer) if error is None else steps.throw(error)
                answer = error = None
                try:
                    answer = step()
                except Exception as failure:  # noqa: BLE001  the controller decides
                    self._failed, error = True, failure
                until = take_time()
                if until > time.now:
                    time.at(until, partial(self._drive, number, steps, answer, error))
                    return
        except StopIteration:
            pass
        except Exception:
            log.exception("%s failed", self._controllers[number][0].name)
        finally:
            # It refers to this frame in turn.
            error = None
        self._idle[number] += 1
        self._changed[number].notify()
        if self._failed:
            # What it learned of a tier may be news to all.
            for each in self._changed:
                each.notify()
