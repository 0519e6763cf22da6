"""The queues of loads from the L2 tiers: one load for each LOOKUP that L1 could answer only in part.

The steps of a load are in `loading.py`. Each tier has its own load threads (`threads.py`); a load is always driven by
a thread of the tier that it asks: it moves from queue to queue, so that a slow tier delays no load of another. A load
that waits for a writer holds no thread. `cancel` ends a load early: END_SESSION, FREE_LOOKUP_LOCKS, a dead client.

Lock order: the storage lock, then `changed`.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvframework.api.keys import PackedKey
from kvframework.storage.l2.l1_interface import L1
from kvframework.storage.l2.loading import AskNext, Loader, LoadSteps, LoadTask, WaitForWriters
from kvframework.storage.l2.sealed_tier import L2Store
from kvframework.storage.l2.steps import Steps
from kvframework.storage.namespaces import NamespaceRecord

MAX_TASKS = 256


class _Load:
    """One accepted load. `task` is None for a namespace's record. `keys` are being written by others, and the load
    waits for them until `waits_until` at the latest; () if it does not wait."""

    def __init__(self, task: LoadTask | None, steps: LoadSteps[None]) -> None:
        self.task = task
        self.steps = steps
        self.keys: Sequence[PackedKey] = ()
        self.waits_until = math.inf


class TierLoads:
    """The loads whose next call is to one tier, driven by its load threads."""

    def __init__(self, prefetcher: Prefetcher, number: int, store: L2Store) -> None:
        self.name = f"prefetch-{store.name}"
        self.changed = prefetcher.changed
        self.ready: deque[_Load] = deque()
        self.waiting: list[_Load] = []
        self._prefetcher = prefetcher
        self._number = number

    @property
    def closing(self) -> bool:
        """True only once no load is left: a thread of another tier may still hand one over."""
        return self._prefetcher.closing and not self._prefetcher.in_flight

    def wait_s(self) -> float:
        """Return the seconds until there is work, as far as is known now."""
        with self.changed:
            if self.ready:
                return 0.0
            soonest = min((load.waits_until for load in self.waiting), default=math.inf)
            return soonest if soonest == math.inf else max(soonest - self._prefetcher.clock(), 0.0)

    def poll(self) -> Steps[None] | None:
        """Return the steps of the next load, to be driven until it ends, waits, or asks another tier. Several may run
        at once."""
        with self.changed:
            now = self._prefetcher.clock()
            self.wake(lambda load: load.waits_until <= now)
            return self._prefetcher.drive(self.ready.popleft(), self._number) if self.ready else None

    def wake(self, due: Callable[[_Load], bool]) -> None:
        """Move `due` loads that waited for writers to the front, before loads that have not begun."""
        awake = [load for load in self.waiting if due(load)]
        if awake:
            self.waiting = [load for load in self.waiting if load not in awake]
            self.ready.extendleft(reversed(awake))


class Prefetcher:
    """Thread-safe, never blocks. `on_done` of every accepted task is called once, in a storage thread, even after a
    failure, a cancel or `stop`; it may submit again. `queues` are those of the tiers, in their order."""

    def __init__(self, l1: L1, stores: Sequence[L2Store], clock: Callable[[], float] = time.monotonic) -> None:
        self.changed = threading.Condition()
        self.closing = False
        self.refused = 0
        self.in_flight = 0
        self.clock = clock
        self._l1 = l1
        self._stores = stores
        self._loader = Loader(l1, stores, clock)
        self._tasks: set[LoadTask] = set()
        self.queues = tuple(TierLoads(self, number, store) for number, store in enumerate(stores))

    def submit(self, task: LoadTask, on_done: Callable[[], None]) -> bool:
        """Queue a load. Returns False if there are no tiers or too many tasks: the caller then uses only the hits of
        L1."""
        return self._submit(_Load(task, self._loader.load(task, on_done)))

    def submit_record(self, namespace: bytes, on_done: Callable[[NamespaceRecord | None], None]) -> bool:
        """Queue a read of a namespace's record from the tiers; False as in `submit`."""
        return self._submit(_Load(None, self._loader.record(namespace, on_done)))

    def writers_ended(self, any_writing: Callable[[Sequence[PackedKey]], bool]) -> None:
        """React to writers of L1 that have committed or given up. `any_writing` says whether keys are still being
        written; the caller holds the storage lock."""
        with self.changed:
            for queue in self.queues:
                queue.wake(lambda load: not any_writing(load.keys))
            self.changed.notify_all()

    def stop(self) -> None:
        """Refuse new tasks and cancel the accepted ones, which end after their calls in flight. Does not wait."""
        with self.changed:
            self.closing = True
            for task in self._tasks:
                task.cancel()
            for queue in self.queues:
                queue.wake(lambda _load: True)
            self.changed.notify_all()

    def drive(self, load: _Load, number: int) -> Steps[None]:
        """Drive a load that asks the tier `number`, until it ends, waits, or asks another tier."""
        answer: object = None
        error: Exception | None = None
        try:
            while True:
                step = load.steps.send(answer) if error is None else load.steps.throw(error)
                answer = error = None
                if isinstance(step, WaitForWriters):
                    if self._wait(load, number, step):
                        return
                elif isinstance(step, AskNext):
                    if self._stores[number] is not step.store:
                        self._hand_over(load, step.store)
                        return
                else:
                    try:
                        answer = yield step
                    except Exception as failure:  # noqa: BLE001  the load decides
                        error = failure
        except StopIteration:
            self._ended(load)
        except BaseException:
            load.steps.close()
            self._ended(load)
            raise

    def _submit(self, load: _Load) -> bool:
        with self.changed:
            if not self._stores or self.closing:
                return False
            if self.in_flight >= MAX_TASKS:
                self.refused += 1
                return False
            self.in_flight += 1
            if load.task is not None:
                self._tasks.add(load.task)
            self.queues[0].ready.append(load)
            self.changed.notify_all()
            return True

    def _wait(self, load: _Load, number: int, step: WaitForWriters) -> bool:
        """Let the load wait; returns False if there is no writer to wait for."""
        load.keys, load.waits_until = step.keys, self.clock() + step.timeout_s
        with self.changed:
            if self.closing:
                return False
            self.queues[number].waiting.append(load)
        if not self._l1.any_writing(step.keys):
            # The writers ended before it waited.
            with self.changed:
                if load in self.queues[number].waiting:
                    self.queues[number].waiting.remove(load)
                    return False
        with self.changed:
            # The threads may be asleep until a later time than this one.
            self.changed.notify_all()
        return True

    def _hand_over(self, load: _Load, store: L2Store) -> None:
        with self.changed:
            self.queues[self._stores.index(store)].ready.append(load)
            self.changed.notify_all()

    def _ended(self, load: _Load) -> None:
        with self.changed:
            self.in_flight -= 1
            if load.task is not None:
                self._tasks.discard(load.task)
            if self.closing:
                self.changed.notify_all()
