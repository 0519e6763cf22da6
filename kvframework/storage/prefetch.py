"""Owns loads from the L2 tiers into L1: a task per LOOKUP that L1 could not answer wholly, run by a few threads.

A task asks the tiers in their order for what L1 lacks, loads what is worth loading straight into the arena, and pins
it until its `on_done` has run. Ended early by `cancel` (END_SESSION, FREE_LOOKUP_LOCKS, a dead client).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from kvframework.api import PackedKey, PrefetchTask
from kvframework.errors import TierError
from kvframework.storage.l2 import L2Store
from kvframework.storage.leases import PinLease
from kvframework.storage.namespaces import RECORD_BYTES, NamespaceRecord, decode_record, record_key

log = logging.getLogger(__name__)

BATCH_OBJECTS = 16
BATCH_BYTES = 64 << 20
MAX_TASKS = 256

# Which of the keys are worth having, given which could be had (by index).
Select = Callable[[Sequence[bool]], Sequence[int]]


class LoadTarget(Protocol):
    """What prefetch needs of L1. All thread-safe."""

    def which_present(self, keys: Sequence[PackedKey]) -> list[bool]: ...

    def pin_present(self, keys: Sequence[PackedKey]) -> list[PinLease]: ...

    def reserve_load(self, key: PackedKey, nbytes: int) -> tuple[str, memoryview] | None: ...

    def finish_load(self, lease_id: str, good: bool) -> PinLease | None: ...

    def loaded(self, keys: Sequence[PackedKey], source: L2Store) -> None: ...

    def wait_written(self, keys: Sequence[PackedKey], timeout_s: float) -> None: ...

    def unpin_internal(self, leases: Sequence[PinLease]) -> None: ...


class LoadTask(PrefetchTask):
    """One load. `done` turns True after `on_done` has run; `loaded` counts objects."""

    def __init__(self, keys: Sequence[PackedKey], sizes: Sequence[int], select: Select) -> None:
        self.keys = keys
        self.sizes = sizes
        self.select = select
        self.done = False
        self.loaded = 0
        self.cancelled = False

    def cancel(self) -> None:
        """Ends the load after the batch in flight; what it has loaded stays in L1. `on_done` runs as always."""
        self.cancelled = True


class Prefetcher:
    """Thread-safe. Submitting never blocks. `on_done` of whatever was accepted is called once, in a storage thread,
    also after a failure, a cancel or `stop`; it may submit again."""

    def __init__(self, target: LoadTarget, stores: Sequence[L2Store], workers: int = 2) -> None:
        self._target = target
        self._stores = stores
        self._changed = threading.Condition()
        self._queue: deque[tuple[LoadTask | None, Callable[[], None]]] = deque()
        self._running: list[LoadTask | None] = []
        self._closing = False
        self.refused = 0
        names = [f"kvf-prefetch-{number}" for number in range(workers if stores else 0)]
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    @property
    def in_flight(self) -> int:
        with self._changed:
            return len(self._queue) + len(self._running)

    def submit(self, task: LoadTask, on_done: Callable[[], None]) -> bool:
        """False if there are no tiers or too many tasks: the caller goes on with what L1 has."""
        return self._submit(task, lambda: self._load(task, on_done))

    def submit_record(self, namespace: bytes, on_done: Callable[[NamespaceRecord | None], None]) -> bool:
        """Asks the tiers for a namespace's record."""
        return self._submit(None, lambda: self._ask_record(namespace, on_done))

    def stop(self) -> None:
        """Refuses new tasks and cancels the accepted ones, which end after their calls in flight. Does not wait."""
        with self._changed:
            self._closing = True
            for task in [task for task, _ in self._queue] + self._running:
                if task is not None:
                    task.cancel()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Waits, after `stop`, for the threads to end; False if they have not within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _submit(self, task: LoadTask | None, work: Callable[[], None]) -> bool:
        with self._changed:
            if not self._stores or self._closing:
                return False
            if len(self._queue) + len(self._running) >= MAX_TASKS:
                self.refused += 1
                return False
            self._queue.append((task, work))
            self._changed.notify()
            return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                task, work = self._queue.popleft()
                self._running.append(task)
            try:
                work()
            except Exception:
                log.exception("a prefetch failed")
            finally:
                with self._changed:
                    self._running.remove(task)

    def _load(self, task: LoadTask, on_done: Callable[[], None]) -> None:
        pins: list[PinLease] = []
        try:
            self._load_into(task, pins)
        finally:
            try:
                on_done()
            finally:
                self._target.unpin_internal(pins)
                task.done = True

    def _load_into(self, task: LoadTask, pins: list[PinLease]) -> None:
        available = self._target.which_present(task.keys)
        missing = [index for index, here in enumerate(available) if not here]
        source = self._locate(task, missing, self._stores)
        for index in source:
            available[index] = True
        chosen = task.select(available)
        worth = set(chosen)
        pins += self._target.pin_present([task.keys[index] for index in chosen if index not in source])
        for batch in _batches([index for index in chosen if index in source], source, task.sizes):
            still = [index for index in batch if index in worth]
            if task.cancelled:
                break
            if not still:
                continue
            lost = self._load_from(task, source[batch[0]], still, pins)
            if lost:
                # What only made sense together with the lost ones need not be loaded any more.
                for index in lost:
                    available[index] = False
                worth = set(task.select(available))

    def _locate(self, task: LoadTask, missing: Sequence[int], stores: Sequence[L2Store]) -> dict[int, L2Store]:
        """The first of `stores` that says it has each."""
        source: dict[int, L2Store] = {}
        for store in stores:
            ask = [index for index in missing if index not in source]
            if not ask or task.cancelled:
                break
            try:
                found = store.contains([task.keys[index] for index in ask])
            except TierError:
                continue
            source.update((index, store) for index, yes in zip(ask, found, strict=True) if yes)
        return source

    def _load_from(self, task: LoadTask, store: L2Store, batch: Sequence[int], pins: list[PinLease]) -> Sequence[int]:
        """Loads a batch from `store`, and what it could not give after all from those behind it; the lost ones."""
        self._load_batch(task, store, batch, pins)
        held = {lease.objects[0].key for lease in pins}
        lost = [index for index in batch if task.keys[index] not in held]
        behind = self._stores[self._stores.index(store) + 1 :]
        if not lost or not behind or task.cancelled:
            return lost
        source = self._locate(task, lost, behind)
        still_lost = [index for index in lost if index not in source]
        for other in behind:
            again = [index for index in lost if source.get(index) is other]
            if again:
                still_lost += self._load_from(task, other, again, pins)
        return still_lost

    def _load_batch(self, task: LoadTask, store: L2Store, batch: Sequence[int], pins: list[PinLease]) -> None:
        """Loads a batch and adds what is then here to `pins`, also what another task or a client wrote meanwhile."""
        elsewhere = self._fetch(task, store, batch, pins)
        if not elsewhere:
            return
        keys = [task.keys[index] for index in elsewhere]
        self._target.wait_written(keys, store.timeout_s)
        written = self._target.pin_present(keys)
        pins += written
        here = {lease.objects[0].key for lease in written}
        abandoned = [index for index in elsewhere if task.keys[index] not in here]
        if abandoned and not task.cancelled:
            self._fetch(task, store, abandoned, pins)

    def _fetch(self, task: LoadTask, store: L2Store, batch: Sequence[int], pins: list[PinLease]) -> list[int]:
        """Loads what there is a place for, adding it to `pins`; the indices of the others."""
        places: list[tuple[int, str, memoryview]] = []
        good: list[bool] = []
        elsewhere: list[int] = []
        try:
            for index in batch:
                place = self._target.reserve_load(task.keys[index], task.sizes[index])
                if place is None:
                    elsewhere.append(index)
                else:
                    places.append((index, *place))
            if places:
                good = store.get_into([task.keys[index] for index, _, _ in places], [view for _, _, view in places])
        except TierError:
            log.debug("tier %s failed during a load", store.name)
        finally:
            loaded: list[PackedKey] = []
            for position, (index, lease_id, _view) in enumerate(places):
                pin = self._target.finish_load(lease_id, bool(good) and good[position])
                if pin is not None:
                    pins.append(pin)
                    loaded.append(task.keys[index])
            task.loaded += len(loaded)
            self._target.loaded(loaded, store)
            for _, _, view in places:
                view.release()
        return elsewhere

    def _ask_record(self, namespace: bytes, on_done: Callable[[NamespaceRecord | None], None]) -> None:
        record = None
        try:
            record = self._record(namespace)
        finally:
            on_done(record)

    def _record(self, namespace: bytes) -> NamespaceRecord | None:
        for store in self._stores:
            value = bytearray(RECORD_BYTES)
            try:
                found = store.get_into([record_key(namespace)], [memoryview(value)])[0]
            except TierError:
                continue
            record = decode_record(bytes(value)) if found else None
            if record is not None:
                return record
        return None


def _batches(wanted: Sequence[int], source: dict[int, L2Store], sizes: Sequence[int]) -> list[list[int]]:
    """Runs of indices with one source each, bounded in number and bytes."""
    batches: list[list[int]] = []
    total = 0
    for index in wanted:
        last = batches[-1] if batches else None
        if (
            last is None
            or source[last[-1]] is not source[index]
            or len(last) >= BATCH_OBJECTS
            or total + sizes[index] > BATCH_BYTES
        ):
            batches.append([index])
            total = sizes[index]
        else:
            last.append(index)
            total += sizes[index]
    return batches
