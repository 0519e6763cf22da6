"""The storage threads of each tier, for its writes and its loads: each calls what its controller gives it; the
controllers make all decisions."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

log = logging.getLogger(__name__)

# A unit of work: it blocks as long as the tier does, and runs to completion.
Work = Callable[[], object]


class Controller(Protocol):
    """A source of work for threads. `changed` is notified whenever there may be work, and when `closing` turns True."""

    name: str
    changed: threading.Condition

    @property
    def closing(self) -> bool:
        """Whether threads without work should end."""

    def wait_s(self) -> float:
        """Return the seconds until there is work; infinite if that depends on others."""

    def poll(self) -> Work | None:
        """Return the next unit of work, None when idle."""


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
    while (work := _next(controller)) is not None:
        try:
            work()
        except Exception:
            log.exception("%s failed", controller.name)
        # What it refers to is not kept while the thread waits.
        del work


def _next(controller: Controller) -> Work | None:
    """Wait for the controller's next unit of work; None once it is closing and has no more."""
    with controller.changed:
        while True:
            work = controller.poll()
            if work is not None or controller.closing:
                return work
            wait_s = controller.wait_s()
            controller.changed.wait(None if wait_s == math.inf else wait_s)
