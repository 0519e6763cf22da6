"""Work of a controller as steps: a generator that yields each call and receives its result. Pure.

Its driver decides when to take a step. A storage thread takes them in sequence (`run`); a simulation interleaves the
steps of many controllers, under its own clock.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

Step = Callable[[], object]
# The driver sends a step's result, or throws its exception.
Steps = Generator[Step, Any, R]


def do(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Steps[R]:
    """Yield a call of `function` as one step, and return its result."""
    result: R = yield partial(function, *args, **kwargs)
    return result


def run(steps: Steps[R]) -> R:
    """Take all steps at once; blocks as long as they do."""
    failure: Exception | None = None
    try:
        step = next(steps)
        while True:
            failure = None
            try:
                result = step()
            except Exception as error:  # noqa: BLE001  the generator decides
                failure = error
            # With the packed objects that it has sent: the generator may pack the next ones now. Until 3.11 an `except`
            # that is not left holds them, too.
            del step
            step = steps.send(result) if failure is None else steps.throw(failure)
    except StopIteration as end:
        answer: R = end.value
        return answer
    finally:
        del failure


# The storage threads of each tier, for its writes and its loads. Each takes its controller's steps in sequence; the
# controllers make all decisions.


class Controller(Protocol):
    """A source of work for threads. `changed` is notified whenever there may be work, and when `closing` turns True."""

    name: str
    changed: threading.Condition

    @property
    def closing(self) -> bool:
        """Whether threads without work should end."""

    def wait_s(self) -> float:
        """Return the seconds until there is work; infinite if that depends on others."""

    def poll(self) -> Steps[None] | None:
        """Return the next unit of work, to be run to completion, or None when idle."""


class StorageThreads:
    """Threads that start at once; each ends when its controller is closing and has no more work."""

    def __init__(self, controllers: Iterable[tuple[Controller, int]]) -> None:
        """Take each controller with the number of its threads."""
        self._threads = [
            threading.Thread(target=_drive, args=(controller,), name=f"kvf-{controller.name}-{number}", daemon=True)
            for controller, count in controllers
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end; return False if one is still running after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)


def _drive(controller: Controller) -> None:
    while (steps := _next(controller)) is not None:
        try:
            run(steps)
        except Exception:
            log.exception("%s failed", controller.name)


def _next(controller: Controller) -> Steps[None] | None:
    """Wait for the controller's next unit of work; None once it is closing and has no more."""
    with controller.changed:
        while True:
            steps = controller.poll()
            if steps is not None or controller.closing:
                return steps
            wait_s = controller.wait_s()
            controller.changed.wait(None if wait_s == math.inf else wait_s)
