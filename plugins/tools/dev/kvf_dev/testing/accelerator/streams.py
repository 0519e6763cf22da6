"""The streams and events of the simulated accelerator: queues with a thread each, and their order."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable

from kvf_dev.testing.accelerator.node import AcceleratorError, ContextLost

_POLL_S = 0.0005


class Event:
    """A point in a stream's work. Interprocess ones have a row in the ledger, `row`; others exist here only. `opening`
    is the row of another process's event that is open here."""

    def __init__(self, device: str, row: int | None = None, *, opening: int | None = None) -> None:
        self.device = device
        self.row = row
        self.opening = opening
        self.opened = opening is not None
        self.closed = False
        self.recorded = 0
        self.reached = 0
        self.error = ""


class Stream:
    """A queue of work in order, each piece after a delay drawn from the node's seed. Its thread ends with the runtime.

    `poison` is called in that thread, with the reason, when a piece of work loses the context.
    """

    def __init__(self, poison: Callable[[str], None], device: str, number: int, seed: str, max_delay_s: float) -> None:
        self.device = device
        self.number = number
        self._poison = poison
        self._random = random.Random(f"{seed}/{number}")  # noqa: S311 - repeatable, not secret
        self._max_delay_s = max_delay_s
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open = threading.Event()
        self._open.set()
        self._holds: list[threading.Event] = []
        self.error = ""
        # Its row in the ledger, of a stream that has to be destroyed.
        self.row: int | None = None
        self._thread = threading.Thread(target=self._run, name=f"sim-stream-{number}", daemon=True)
        self._thread.start()

    def add(self, work: Callable[[], None]) -> None:
        """Queue a piece of work. Its error is the stream's until an event has taken it."""
        self._work.put(work)

    def hold(self) -> None:
        """Begin no further work of the stream until `release`: as if the work before took very long."""
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def hold_behind(self, ended: Callable[[], bool]) -> Callable[[], None]:
        """Begin the work queued from now on once the returned function was called, in any thread; not at all, if the
        runtime has `ended` before."""
        released = threading.Event()
        self._holds = [each for each in self._holds if not each.is_set()] + [released]
        self.add(lambda: wait_until_reached(released.is_set, ended))
        return released.set

    @property
    def held(self) -> bool:
        """Whether work queued now is behind a hold."""
        return not all(each.is_set() for each in self._holds)

    def synchronize(self, timeout: float = 20.0) -> None:
        """Wait for all queued work. Raises the stream's error, if there was one."""
        done = threading.Event()
        self.add(done.set)
        if not done.wait(timeout):
            raise AcceleratorError(f"stream {self.number} did not come to an end within {timeout} s")
        error, self.error = self.error, ""
        if error:
            raise AcceleratorError(error)

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def end_later(self) -> None:
        """End its thread after all queued work."""
        self._work.put(None)

    def end(self) -> None:
        self._open.set()
        self._work.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._open.wait()
            delay = self._random.uniform(0, self._max_delay_s)
            if delay > _POLL_S / 5:
                time.sleep(delay)
            try:
                work()
            except ContextLost as error:
                self._poison(str(error))
            except AcceleratorError as error:
                self.error = self.error or str(error)
            except Exception as error:  # noqa: BLE001 - a stream never ends before its runtime
                self.error = self.error or f"{type(error).__name__}: {error}"


def wait_until_reached(reached: Callable[[], bool], ended: Callable[[], bool]) -> None:
    """Wait in a stream's thread until an event is reached. Raises `AcceleratorError` if that is no longer possible."""
    while not reached():
        if ended():
            raise AcceleratorError("what it waits for ended before that was reached")
        time.sleep(_POLL_S)
