"""The storage threads of each tier, for its writes and its loads. Each takes its controller's steps in sequence; the
controllers make all decisions."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable
from typing import Protocol

from kvframework.storage.l2.steps import Steps, run

log = logging.getLogger(__name__)


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
