"""Owns the queue of loads from the L2 tiers: one for each LOOKUP that L1 could not answer wholly.

How a load goes is in `loading.py`; a few storage threads (`threads.py`) drive them. `cancel` ends one early:
END_SESSION, FREE_LOOKUP_LOCKS, a dead client.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvframework.storage.l2 import L2Store
from kvframework.storage.loading import Loader, LoadTarget, LoadTask
from kvframework.storage.namespaces import NamespaceRecord
from kvframework.storage.steps import Steps

MAX_TASKS = 256


class Prefetcher:
    """Thread-safe, never blocks. `on_done` of whatever was accepted is called once, in a storage thread, also after a
    failure, a cancel or `stop`; it may submit again."""

    name = "prefetch"

    def __init__(self, target: LoadTarget, stores: Sequence[L2Store]) -> None:
        self.changed = threading.Condition()
        self.closing = False
        self.refused = 0
        self._stores = stores
        self._loader = Loader(target, stores)
        self._queue: deque[tuple[LoadTask | None, Steps[None]]] = deque()
        self._running: list[LoadTask | None] = []

    @property
    def in_flight(self) -> int:
        with self.changed:
            return len(self._queue) + len(self._running)

    def submit(self, task: LoadTask, on_done: Callable[[], None]) -> bool:
        """False if there are no tiers or too many tasks: the caller goes on with what L1 has."""
        return self._submit(task, self._loader.load(task, on_done))

    def submit_record(self, namespace: bytes, on_done: Callable[[NamespaceRecord | None], None]) -> bool:
        """Asks the tiers for a namespace's record."""
        return self._submit(None, self._loader.record(namespace, on_done))

    def stop(self) -> None:
        """Refuses new tasks and cancels the accepted ones, which end after their calls in flight. Does not wait."""
        with self.changed:
            self.closing = True
            for task in [task for task, _ in self._queue] + self._running:
                if task is not None:
                    task.cancel()
            self.changed.notify_all()

    # driven by storage threads

    def wait_s(self) -> float:
        """Seconds until there is something to do, for all that is known now."""
        return 0.0 if self._queue else math.inf

    def poll(self) -> Steps[None] | None:
        """The next task, to be taken to its end; None if there is none. Several may be under way."""
        with self.changed:
            if not self._queue:
                return None
            task, steps = self._queue.popleft()
            self._running.append(task)
            return self._to_the_end(task, steps)

    def _submit(self, task: LoadTask | None, steps: Steps[None]) -> bool:
        with self.changed:
            if not self._stores or self.closing:
                return False
            if len(self._queue) + len(self._running) >= MAX_TASKS:
                self.refused += 1
                return False
            self._queue.append((task, steps))
            self.changed.notify()
            return True

    def _to_the_end(self, task: LoadTask | None, steps: Steps[None]) -> Steps[None]:
        try:
            yield from steps
        finally:
            with self.changed:
                self._running.remove(task)
