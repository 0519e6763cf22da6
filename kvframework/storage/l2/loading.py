"""How one load goes: which tier is asked for what, what is worth loading, and what is done about what was lost.

As steps: every call to a tier is one. Two more say how to go on: `AskNext` before the calls to a tier, so that a thread
of this tier takes them, and `WaitForWriters`, which needs no thread. What they reserve and pin ends with them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from kvframework.api import PackedKey, PrefetchTask, Select
from kvframework.errors import TierError
from kvframework.storage.l1.leases import PinLease
from kvframework.storage.l2.steps import Step, Steps, do
from kvframework.storage.l2.store import L2Store
from kvframework.storage.namespaces import RECORD_BYTES, NamespaceRecord, decode_record, record_key

log = logging.getLogger(__name__)
R = TypeVar("R")

BATCH_OBJECTS = 16
BATCH_BYTES = 64 << 20


class LoadTarget(Protocol):
    """What a load needs of L1. All thread-safe."""

    def which_present(self, keys: Sequence[PackedKey]) -> list[bool]: ...

    def pin_present(self, keys: Sequence[PackedKey]) -> list[PinLease]: ...

    def reserve_load(self, key: PackedKey, nbytes: int) -> tuple[str, memoryview] | None: ...

    def finish_load(self, lease_id: str, good: bool) -> PinLease | None: ...

    def loaded(self, keys: Sequence[PackedKey], source: L2Store) -> None: ...

    def any_writing(self, keys: Sequence[PackedKey]) -> bool: ...

    def unpin_internal(self, leases: Sequence[PinLease]) -> None: ...


@dataclass(frozen=True)
class AskNext:
    """The next calls are to this tier."""

    store: L2Store


@dataclass(frozen=True)
class WaitForWriters:
    """The load goes on once others have ended writing `keys`, or after `timeout_s`."""

    keys: Sequence[PackedKey]
    timeout_s: float


LoadSteps = Generator[Step | AskNext | WaitForWriters, Any, R]


class LoadTask(PrefetchTask):
    """One load. `done` turns True after `on_done` and all callbacks have run; `loaded` counts objects."""

    def __init__(self, keys: Sequence[PackedKey], sizes: Sequence[int], select: Select) -> None:
        self.keys = keys
        self.sizes = sizes
        self.select = select
        self.done = False
        self.loaded = 0
        self.cancelled = False
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] | None = []

    def add_done_callback(self, call: Callable[[], object]) -> None:
        """See `PrefetchTask`."""
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(call)
                return
        _call(call)

    def call_back(self) -> None:
        """Runs the callbacks; one that is added from now on runs at once."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks or [], None
        for call in callbacks:
            _call(call)

    def cancel(self) -> None:
        """Ends the load after the batch in flight; what it has loaded stays in L1. `on_done` runs as always."""
        self.cancelled = True


class Loader:
    """Holds nothing of a load. `stores` are the tiers in their order."""

    def __init__(self, target: LoadTarget, stores: Sequence[L2Store]) -> None:
        self._target = target
        self._stores = stores

    def load(self, task: LoadTask, on_done: Callable[[], None]) -> LoadSteps[None]:
        """`on_done` runs once, whatever happens, while what was chosen and could be had is pinned."""
        pins: list[PinLease] = []
        try:
            yield from self._load_into(task, pins)
        except Exception:
            log.exception("a load failed")
        try:
            yield from do(on_done)
        finally:
            task.call_back()
            self._target.unpin_internal(pins)
            task.done = True

    def record(self, namespace: bytes, on_done: Callable[[NamespaceRecord | None], None]) -> LoadSteps[None]:
        """Asks the tiers for a namespace's record; `on_done` runs once, whatever happens."""
        record = None
        try:
            record = yield from self._record(namespace)
        except Exception:
            log.exception("a record was not read")
        yield from do(on_done, record)

    def _load_into(self, task: LoadTask, pins: list[PinLease]) -> LoadSteps[None]:
        available = yield from do(self._target.which_present, task.keys)
        missing = [index for index, here in enumerate(available) if not here]
        source = yield from self._locate(task, missing, self._stores)
        for index in source:
            available[index] = True
        chosen = task.select(available)
        worth = set(chosen)
        pins += yield from do(self._target.pin_present, [task.keys[index] for index in chosen if index not in source])
        for batch in _batches([index for index in chosen if index in source], source, task.sizes):
            still = [index for index in batch if index in worth]
            if task.cancelled:
                break
            if not still:
                continue
            lost = yield from self._load_from(task, source[batch[0]], still, pins)
            if lost:
                # What only made sense together with the lost ones need not be loaded any more.
                for index in lost:
                    available[index] = False
                worth = set(task.select(available))

    def _locate(
        self, task: LoadTask, missing: Sequence[int], stores: Sequence[L2Store]
    ) -> LoadSteps[dict[int, L2Store]]:
        """The first of `stores` that says it has each."""
        source: dict[int, L2Store] = {}
        for store in stores:
            ask = [index for index in missing if index not in source]
            if not ask or task.cancelled:
                break
            yield AskNext(store)
            try:
                found = yield from store.contains_steps([task.keys[index] for index in ask])
            except TierError:
                continue
            source.update((index, store) for index, yes in zip(ask, found, strict=True) if yes)
        return source

    def _load_from(
        self, task: LoadTask, store: L2Store, batch: Sequence[int], pins: list[PinLease]
    ) -> LoadSteps[Sequence[int]]:
        """Loads a batch from `store`, and what it could not give after all from those behind it; the lost ones."""
        yield AskNext(store)
        yield from self._load_batch(task, store, batch, pins)
        held = {lease.objects[0].key for lease in pins}
        lost = [index for index in batch if task.keys[index] not in held]
        behind = self._stores[self._stores.index(store) + 1 :]
        if not lost or not behind or task.cancelled:
            return lost
        source = yield from self._locate(task, lost, behind)
        still_lost = [index for index in lost if index not in source]
        for other in behind:
            again = [index for index in lost if source.get(index) is other]
            if again:
                still_lost += yield from self._load_from(task, other, again, pins)
        return still_lost

    def _load_batch(
        self, task: LoadTask, store: L2Store, batch: Sequence[int], pins: list[PinLease]
    ) -> LoadSteps[None]:
        """Loads a batch and adds what is then here to `pins`, also what another task or a client wrote meanwhile."""
        elsewhere = yield from self._fetch(task, store, batch, pins)
        if not elsewhere:
            return
        keys = [task.keys[index] for index in elsewhere]
        yield WaitForWriters(keys, store.timeout_s)
        written = yield from do(self._target.pin_present, keys)
        pins += written
        here = {lease.objects[0].key for lease in written}
        abandoned = [index for index in elsewhere if task.keys[index] not in here]
        if abandoned and not task.cancelled:
            yield from self._fetch(task, store, abandoned, pins)

    def _fetch(self, task: LoadTask, store: L2Store, batch: Sequence[int], pins: list[PinLease]) -> Steps[list[int]]:
        """Loads what there is a place for, adding it to `pins`; the indices of the others."""
        places: list[tuple[int, str, memoryview]] = []
        good: list[bool] = []
        elsewhere: list[int] = []
        try:
            for index in batch:
                place = yield from do(self._target.reserve_load, task.keys[index], task.sizes[index])
                if place is None:
                    elsewhere.append(index)
                else:
                    places.append((index, *place))
            if places:
                keys = [task.keys[index] for index, _, _ in places]
                good = yield from store.get_steps(keys, [view for _, _, view in places])
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

    def _record(self, namespace: bytes) -> LoadSteps[NamespaceRecord | None]:
        for store in self._stores:
            value = bytearray(RECORD_BYTES)
            yield AskNext(store)
            try:
                found = yield from store.get_steps([record_key(namespace)], [memoryview(value)])
            except TierError:
                continue
            record = decode_record(bytes(value)) if found[0] else None
            if record is not None:
                return record
        return None


def _call(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:
        log.exception("the callback of a load failed")


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
