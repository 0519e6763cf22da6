"""The queues of loads from the L2 tiers: one load for each LOOKUP that L1 could answer only in part.

A load, whose steps are in `loading.py`, is always driven by a thread of the tier that it asks: it moves from queue to
queue, so that a slow tier delays no load of another. Its batches are driven apart, several at once; the next one queues
behind the batches of other loads, so loads take turns. A tier has one thread more than batches are fetched from it at
once, so what others ask is answered meanwhile. A load that waits for a writer, or for its batches, holds no thread.

A tier that failed is passed over by loads; an idle load thread of it asks whether it answers again.

Lock order: the storage lock, then that of `changed`, which all queues share."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvframework.api.keys import PackedKey
from kvframework.storage.l2.loading import Apart, Loader, LoadSteps, LoadTask, WaitForWriters
from kvframework.storage.l2.sealed_tier import L2Store

MAX_TASKS = 256


@dataclass(eq=False)
class _Load:
    """One accepted load, or one batch of its `whole`. `task` is None for a namespace's record, and for a batch. `keys`
    are being written by others, and the load waits for them until `waits_until` at the latest; () if it waits for none.
    `parts` wait for their turn, and `under_way` of them have begun. `error` is thrown into the steps."""

    task: LoadTask | None
    steps: LoadSteps[None]
    whole: _Load | None = None
    keys: Sequence[PackedKey] = ()
    waits_until: float = math.inf
    parts: deque[LoadSteps[None]] = field(default_factory=deque)
    under_way: int = 0
    error: Exception | None = None
    ahead: bool = False


class TierLoads:
    """The loads whose next call is to one tier, driven by its load threads, of which `at_once` fetch batches."""

    def __init__(self, prefetcher: Prefetcher, number: int, store: L2Store, at_once: int) -> None:
        self.name = f"prefetch-{store.name}"
        self.at_once = at_once
        self.changed = threading.Condition(prefetcher.lock)
        self.waiting: list[_Load] = []
        self._prefetcher = prefetcher
        self._number = number
        self._store = store
        # Loads that ask what the tier has, or go on; and batches, which take longer.
        self._questions: deque[_Load] = deque()
        self._batches: deque[_Load] = deque()
        # Loads ahead of their request let all other loads go first, one batch at a time.
        self._ahead: deque[_Load] = deque()
        self._fetching = 0
        self._batch_next = False

    @property
    def closing(self) -> bool:
        """True only once no load is left: a thread of another tier may still hand one over."""
        return self._prefetcher.closing and not self._prefetcher.in_flight

    def wait_s(self) -> float:
        """Return the seconds until there is work, as far as is known now."""
        with self.changed:
            if self._questions or self._batch_may_begin or (self._ahead and not self._fetching):
                return 0.0
            soonest = min((load.waits_until for load in self.waiting), default=math.inf)
            return min(max(soonest - self._prefetcher.clock(), 0.0), self._probe_s)

    def poll(self) -> Callable[[], object] | None:
        """Return the work on the next load, until it ends, waits, or asks another tier. Several may run at once."""
        with self.changed:
            now = self._prefetcher.clock()
            self.wake(lambda load: load.waits_until <= now)
            load = self._next()
            if load is not None:
                return partial(self._drive, load)
            return self._store.answers if self._probe_s <= 0 else None

    def add(self, load: _Load, *, first: bool = False) -> None:
        """Queue a load; with `first`, before those that have not begun. The caller holds the lock."""
        queue = self._ahead if load.ahead else self._questions if load.whole is None else self._batches
        queue.insert(0 if first else len(queue), load)
        self.changed.notify()

    def wake(self, due: Callable[[_Load], bool]) -> None:
        """Move `due` loads that waited for writers to the front, before loads that have not begun."""
        awake = [load for load in self.waiting if due(load)]
        for load in reversed(awake):
            self.waiting.remove(load)
            self.add(load, first=True)

    @property
    def _batch_may_begin(self) -> bool:
        return bool(self._batches) and self._fetching < self.at_once

    def _next(self) -> _Load | None:
        """Take a question, which is quick, and a batch in turn: neither waits for all of the others."""
        if self._batch_may_begin and (self._batch_next or not self._questions):
            self._batch_next = False
            self._fetching += 1
            return self._batches.popleft()
        self._batch_next = True
        if self._questions or self._fetching or not self._ahead:
            return self._questions.popleft() if self._questions else None
        self._fetching += self._ahead[0].whole is not None
        return self._ahead.popleft()

    @property
    def _probe_s(self) -> float:
        return math.inf if self._prefetcher.closing else self._store.probe_s()

    def _drive(self, load: _Load) -> None:
        try:
            self._prefetcher.drive(load, self._number)
        finally:
            if load.whole is not None:
                with self.changed:
                    self._fetching -= 1


class Prefetcher:
    """Thread-safe, never blocks. `on_done` of every accepted task is called once, in a storage thread, even after a
    failure, a cancel or `stop`; it may submit again. `queues` are those of the tiers, in their order."""

    def __init__(self, loader: Loader) -> None:
        self.lock = threading.RLock()
        self.closing = False
        self.refused = 0
        self.in_flight = 0
        self.clock = loader.clock
        self._l1 = loader.l1
        self._stores = loader.stores
        self._loader = loader
        self._tasks: set[LoadTask] = set()
        self.queues = tuple(
            TierLoads(self, number, store, loader.at_once[store]) for number, store in enumerate(loader.stores)
        )

    def submit(self, task: LoadTask, on_done: Callable[[], None]) -> bool:
        """Queue a load. Returns False if there are no tiers or too many tasks: the caller uses the hits of L1."""
        return self._submit(_Load(task, self._loader.load(task, on_done), ahead=task.ahead))

    def submit_record(self, namespace: bytes, on_done: Callable[[], None]) -> bool:
        """Queue a read of a namespace's record from the tiers, which is added to the records; False as in `submit`."""
        return self._submit(_Load(None, self._loader.load_record(namespace, on_done)))

    def writers_ended(self, any_writing: Callable[[Sequence[PackedKey]], bool]) -> None:
        """React to writers of L1 that have committed or given up. `any_writing` says whether keys are still being
        written; the caller holds the storage lock."""
        # A load that begins to wait now checks by itself.
        if any(queue.waiting for queue in self.queues):
            with self.lock:
                for queue in self.queues:
                    queue.wake(lambda load: bool(load.keys) and not any_writing(load.keys))

    def stop(self) -> None:
        """Refuse new tasks and cancel the accepted ones, which end after their calls in flight. Does not wait."""
        with self.lock:
            self.closing = True
            for task in self._tasks:
                task.cancel()
            for queue in self.queues:
                queue.wake(lambda _load: True)
                queue.changed.notify_all()

    def drive(self, load: _Load, number: int) -> None:
        """Drive a load that asks the tier `number`, until it ends, waits, or asks another tier. The thread of the last
        batch goes on with the whole load."""
        going: _Load | None = load
        while going is not None:
            going = self._drive(going, number)

    def _drive(self, load: _Load, number: int) -> _Load | None:
        error, load.error = load.error, None
        try:
            while True:
                step = next(load.steps) if error is None else load.steps.throw(error)
                error = None
                if isinstance(step, WaitForWriters):
                    if self._wait(load, number, step):
                        return None
                elif isinstance(step, Apart):
                    self._split(load, number, step.parts)
                    return None
                elif self._stores[number] is not step:
                    with self.lock:
                        self.queues[self._stores.index(step)].add(load)
                    return None
        except StopIteration:
            return self._ended(load, number)
        except Exception as bug:
            if load.whole is None:
                self._ended(load, number)
                raise
            return self._ended(load, number, bug)
        except BaseException:
            load.steps.close()
            self._ended(load, number)
            raise
        finally:
            # The exception refers to this frame: break the cycle.
            error = None

    def _submit(self, load: _Load) -> bool:
        with self.lock:
            if not self._stores or self.closing:
                return False
            if self.in_flight >= MAX_TASKS:
                self.refused += 1
                return False
            self.in_flight += 1
            if load.task is not None:
                self._tasks.add(load.task)
            self.queues[0].add(load)
            return True

    def _wait(self, load: _Load, number: int, step: WaitForWriters) -> bool:
        """Let the load wait; returns False if there is no writer to wait for."""
        load.keys, load.waits_until = step.keys, self.clock() + step.timeout_s
        queue = self.queues[number]
        with self.lock:
            if self.closing:
                return False
            queue.waiting.append(load)
            # The threads may be asleep until a later time than this one.
            queue.changed.notify_all()
        if step.keys and not self._l1.any_writing(step.keys):
            # The writers ended before it waited.
            with self.lock:
                if load in queue.waiting:
                    queue.waiting.remove(load)
                    return False
        return True

    def _split(self, load: _Load, number: int, parts: Sequence[LoadSteps[None]]) -> None:
        """Queue the first batches of a load, as many as are fetched at once; each queues the next one at its end."""
        with self.lock:
            load.parts.extend(parts)
            for _ in range(min(self.queues[number].at_once, len(load.parts))):
                self._begin_part(load, number)

    def _begin_part(self, load: _Load, number: int) -> None:
        load.under_way += 1
        self.queues[number].add(_Load(None, load.parts.popleft(), load, ahead=load.ahead))

    def _ended(self, load: _Load, number: int, bug: Exception | None = None) -> _Load | None:
        """Account for the end of a load or of a batch; return the whole load after its last batch, to be driven."""
        with self.lock:
            whole = load.whole
            if whole is None:
                self.in_flight -= 1
                if load.task is not None:
                    self._tasks.discard(load.task)
                if self.closing:
                    for queue in self.queues:
                        queue.changed.notify_all()
                return None
            whole.under_way -= 1
            whole.error = whole.error or bug
            if whole.parts:
                self._begin_part(whole, number)
            return None if whole.under_way else whole
