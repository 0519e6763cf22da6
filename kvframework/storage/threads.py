"""Owns the storage threads: one for each tier's write-back, a few for loads. Each takes its controller's steps, one
after the other; all decisions are the controllers'."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from kvframework.storage.steps import Steps, run

log = logging.getLogger(__name__)

LOADS_AT_ONCE = 2


class Controller(Protocol):
    """What has work for a thread. `changed` is notified whenever there may be some, and when `closing` turns True."""

    name: str
    changed: threading.Condition
    closing: bool

    def wait_s(self) -> float:
        """Seconds until there is something to do; infinite if that depends on others."""

    def poll(self) -> Steps[None] | None:
        """What is to be done now, to its end; None if nothing is."""


class StorageThreads:
    """Started at once; each ends after its controller has been told to close and has nothing to do any more."""

    def __init__(self, writebacks: Sequence[Controller], prefetcher: Controller) -> None:
        loads = LOADS_AT_ONCE if writebacks else 0
        self._threads = [
            threading.Thread(target=_drive, args=(controller,), name=f"kvf-{controller.name}{suffix}", daemon=True)
            for controller, suffix in [
                *((writeback, "") for writeback in writebacks),
                *((prefetcher, f"-{number}") for number in range(loads)),
            ]
        ]
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> bool:
        """Waits for the threads to end; False if one has not within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)


def _drive(controller: Controller) -> None:
    while True:
        with controller.changed:
            steps = controller.poll()
            while steps is None:
                if controller.closing:
                    return
                wait_s = controller.wait_s()
                controller.changed.wait(None if wait_s == math.inf else wait_s)
                steps = controller.poll()
        try:
            run(steps)
        except Exception:
            log.exception("%s failed", controller.name)
