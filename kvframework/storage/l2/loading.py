"""The steps of one load: which tier is asked for which objects, which of them are worth loading, and the reaction to
losses.

A load is a generator, since it goes from a thread of one tier to one of another. Three kinds of step direct its driver:
`AskNext` before the calls to a tier, so that a thread of this tier makes them, `WaitForWriters`, which needs no thread,
and `Apart`, the batches of a load, which several threads fetch at once. Reservations and pins of a load end with it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvframework.api.listener import TierCall
from kvframework.api.requests import PackedKey, PrefetchTask, Select
from kvframework.errors import TierError
from kvframework.pricing import Load
from kvframework.storage.l1.leases import NO_PROMPT, PinLease, PromptPart
from kvframework.storage.l2.sealed_tier import L1, L2Store
from kvframework.storage.namespaces import RECORD_BYTES, NamespaceRecord, decode_record, record_key

log = logging.getLogger(__name__)
R = TypeVar("R")

# Small enough that a prompt keeps several threads busy, and that what has arrived is used while the rest arrives.
BATCH_OBJECTS = 16
BATCH_BYTES = 16 << 20
# A load of fewer bytes for each thread is not spread over all of them: a call has its price, too.
LEAST_BYTES = 4 << 20
# Calls to tiers that a load remembers.
MAX_CALLS = 64


@dataclass(frozen=True)
class AskNext:
    """The next calls go to this tier."""

    store: L2Store


@dataclass(frozen=True)
class WaitForWriters:
    """The load continues once other writers of `keys` have ended, or after `timeout_s`."""

    keys: Sequence[PackedKey]
    timeout_s: float


@dataclass(frozen=True)
class Apart:
    """The load continues once all these steps have ended, each driven by itself, several at once; they begin in this
    order. The first exception of any is thrown into the load then."""

    parts: Sequence[LoadSteps[None]]


# Learns, once the tiers have said what they have, which objects L1 has and where each of the others is.
Located = Callable[[Sequence[bool], Mapping[int, L2Store]], object]
LoadSteps = Generator[AskNext | WaitForWriters | Apart, None, R]


class LoadTask(PrefetchTask):
    """One load. `done` turns True after `on_done` and all callbacks have run; `loaded` counts objects, and `calls` are
    its first `MAX_CALLS` calls to tiers. `decided` turns True once the tiers have said what they have. `on_change` is
    called in a storage thread after that, when objects have arrived, and at the end; it must not block. `located` is
    called there, too, before the first `select`. `prompt` says where the objects are, for the eviction policy; `client`
    is the session that looks them up, 0 for none."""

    def __init__(
        self,
        keys: Sequence[PackedKey],
        sizes: Sequence[int],
        select: Select,
        on_change: Callable[[], object] = lambda: None,
        located: Located | None = None,
        prompt: PromptPart = NO_PROMPT,
        client: int = 0,
    ) -> None:
        self.keys = keys
        self.sizes = sizes
        self.select = select
        self.on_change = on_change
        self.located = located
        self.prompt = prompt
        self.client = client
        self.decided = False
        self.done = False
        self.loaded = 0
        self.cancelled = False
        self.calls: list[TierCall] = []
        # What is worth loading and waits for it, by tier.
        self.loads: dict[L2Store, Load] = {}
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] | None = []

    def add_done_callback(self, call: Callable[[], object]) -> None:
        """See `PrefetchTask`."""
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(call)
                return
        _call(call)

    def arrived(self, objects: int) -> None:
        """Count objects that are in L1 now. Several threads load them."""
        with self._lock:
            self.loaded += objects
        if objects:
            _call(self.on_change)

    def no_longer(self, store: L2Store, nbytes: int | None = None) -> None:
        """So many bytes of a tier wait no longer, None: no byte of it does."""
        load = self.loads.get(store)
        if load is not None:
            with store.pricing:
                store.speed.gone(load, load.nbytes if nbytes is None else min(nbytes, load.nbytes))

    def call_back(self) -> None:
        """Run the callbacks; a callback added later runs at once."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks or [], None
        for call in callbacks:
            _call(call)

    def forget(self) -> None:
        """Drop the functions of a load that is over: they refer to this task in turn."""
        self.select, self.on_change, self.located = _nothing, lambda: None, None

    def cancel(self) -> None:
        """End the load after the batch in flight; objects it has loaded stay in L1. `on_done` runs in any case."""
        self.cancelled = True


def _nothing(_available: Sequence[bool]) -> Sequence[int]:
    return ()


class Worth:
    """The objects of a load that are worth loading, as far as known: all its threads use it at once."""

    def __init__(self, task: LoadTask, available: list[bool]) -> None:
        self.chosen = task.select(available)
        self._task = task
        self._available = available
        self._worth = set(self.chosen)
        self._lock = threading.Lock()

    def of(self, batch: Sequence[int]) -> list[int]:
        with self._lock:
            return [index for index in batch if index in self._worth]

    def lose(self, lost: Sequence[int]) -> None:
        with self._lock:
            for index in lost:
                self._available[index] = False
            if lost:
                self._worth = set(self._task.select(self._available))


class Loader:
    """Makes the steps of loads; keeps no state of a load. `stores` are the tiers in their order, from which `at_once`
    batches are fetched at once."""

    def __init__(
        self,
        l1: L1,
        stores: Sequence[L2Store],
        at_once: Sequence[int],
        loaded: Callable[[Sequence[PackedKey], L2Store], None],
        clock: Callable[[], float],
    ) -> None:
        self._l1 = l1
        self._stores = stores
        self._loaded = loaded
        self._at_once = dict(zip(stores, at_once, strict=True))
        self._clock = clock

    def load(self, task: LoadTask, on_done: Callable[[], None]) -> LoadSteps[None]:
        """Load, then run `on_done` once, in any case, while the chosen objects that were found are pinned."""
        pins: list[PinLease] = []
        try:
            yield from self._load_into(task, pins)
        except Exception:
            log.exception("a load failed")
        try:
            on_done()
        finally:
            for store in self._stores:
                task.no_longer(store)
            task.call_back()
            self._l1.release(pins)
            task.done = True
            _call(task.on_change)
            task.forget()

    def record(self, namespace: bytes, on_done: Callable[[NamespaceRecord | None], None]) -> LoadSteps[None]:
        """Read a namespace's record from the tiers; `on_done` runs once, in any case."""
        record = None
        try:
            record = yield from self._record(namespace)
        except Exception:
            log.exception("a record was not read")
        on_done(record)

    def _load_into(self, task: LoadTask, pins: list[PinLease]) -> LoadSteps[None]:
        available = self._l1.which_present(task.keys)
        missing = [index for index, here in enumerate(available) if not here]
        source = yield from self._locate(task, missing, self._stores)
        if task.located is not None:
            task.located(tuple(available), source)
        for index in source:
            available[index] = True
        worth = Worth(task, available)
        chosen = worth.chosen
        task.decided = True
        if source:
            _call(task.on_change)
        pins += self._l1.pin_present([task.keys[index] for index in chosen if index not in source])
        wanted: Counter[L2Store] = Counter()
        for index in chosen:
            if index in source:
                wanted[source[index]] += task.sizes[index] * source[index].scale
        for store, nbytes in wanted.items():
            with store.pricing:
                task.loads[store] = store.speed.chosen(nbytes, self._clock())
        batches = _batches([index for index in chosen if index in source], source, task.sizes, self._at_once)
        parts = [self._load_worthy(task, source[batch[0]], batch, worth, pins) for batch in batches]
        if parts:
            yield Apart(parts)

    def _load_worthy(
        self, task: LoadTask, store: L2Store, batch: Sequence[int], worth: Worth, pins: list[PinLease]
    ) -> LoadSteps[None]:
        """Load those of a batch that are still worth it."""
        still = worth.of(batch)
        try:
            if still and not task.cancelled:
                # Objects that were useful only together with the lost ones need not be loaded.
                worth.lose((yield from self._load_from(task, store, still, pins)))
        finally:
            task.no_longer(store, store.scale * sum(task.sizes[index] for index in batch))

    def _locate(
        self, task: LoadTask, missing: Sequence[int], stores: Sequence[L2Store]
    ) -> LoadSteps[dict[int, L2Store]]:
        """Return, for each index, the first of `stores` that reports it."""
        source: dict[int, L2Store] = {}
        for store in stores:
            ask = [index for index in missing if index not in source]
            if not ask or task.cancelled:
                break
            yield AskNext(store)
            try:
                store.spare_the_request("contains")
                asking = partial(store.contains, [task.keys[index] for index in ask])
                found = self._noted(task, store, "contains", len(ask), asking)
            except TierError:
                continue
            source.update((index, store) for index, yes in zip(ask, found, strict=True) if yes)
        return source

    def _load_from(
        self, task: LoadTask, store: L2Store, batch: Sequence[int], pins: list[PinLease]
    ) -> LoadSteps[Sequence[int]]:
        """Load a batch from `store`, and objects that it failed to return from later tiers; return the indices that
        were lost."""
        yield AskNext(store)
        before = len(pins)
        yield from self._load_batch(task, store, batch, pins)
        held = {lease.objects[0].key for lease in pins[before:]}
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
        """Load a batch and add the objects then in L1 to `pins`, including those that other tasks or clients wrote
        meanwhile."""
        elsewhere = self._fetch(task, store, batch, pins)
        if not elsewhere:
            return
        keys = [task.keys[index] for index in elsewhere]
        yield WaitForWriters(keys, store.timeout_s)
        written = self._l1.pin_present(keys)
        pins += written
        here = {lease.objects[0].key for lease in written}
        abandoned = [index for index in elsewhere if task.keys[index] not in here]
        if abandoned and not task.cancelled:
            self._fetch(task, store, abandoned, pins)

    def _fetch(self, task: LoadTask, store: L2Store, batch: Sequence[int], pins: list[PinLease]) -> list[int]:
        """Load the objects for which there is a place, and add them to `pins`; return the indices of the others."""
        places: list[tuple[int, str, memoryview]] = []
        good: list[bool] = []
        elsewhere: list[int] = []
        try:
            store.spare_the_request("get_into")
            for index in batch:
                part = PromptPart(task.prompt.of([index]), task.prompt.chunk_tokens)
                place = self._l1.reserve_load(task.keys[index], task.sizes[index], part, task.client)
                if place is None:
                    elsewhere.append(index)
                else:
                    places.append((index, *place))
            if places:
                keys = [task.keys[index] for index, _, _ in places]
                views = [view for _, _, view in places]
                getting = partial(self._get, task, store, keys, views)
                good = self._noted(task, store, "get", len(keys), getting)
        except TierError:
            log.debug("tier %s failed during a load", store.name)
        finally:
            loaded: list[PackedKey] = []
            for position, (index, lease_id, _view) in enumerate(places):
                pin = self._l1.finish_load(lease_id, bool(good) and good[position])
                if pin is not None:
                    pins.append(pin)
                    loaded.append(task.keys[index])
            self._loaded(loaded, store)
            task.arrived(len(loaded))
            for _, _, view in places:
                view.release()
        return elsewhere

    def _noted(
        self, task: LoadTask, store: L2Store, operation: str, values: int, call: Callable[[], list[bool]]
    ) -> list[bool]:
        """Make a call to a tier, and add it to the task."""
        began, answers = self._clock(), None
        try:
            answers = call()
            return answers
        finally:
            if len(task.calls) < MAX_CALLS:
                seconds, ok = self._clock() - began, answers is not None
                task.calls.append(TierCall(store.name, operation, began, seconds, values, sum(answers or ()), ok))

    def _get(
        self, task: LoadTask, store: L2Store, keys: Sequence[PackedKey], views: Sequence[memoryview]
    ) -> list[bool]:
        """Load, and learn the tier's speed from it."""
        with store.pricing:
            nbytes = store.scale * sum(view.nbytes for view in views)
            call = store.speed.begin(nbytes, self._clock())
        loaded = 0
        try:
            good = store.get(keys, views)
            loaded = store.scale * sum(view.nbytes for view, ok in zip(views, good, strict=True) if ok)
            return good
        finally:
            with store.pricing:
                store.speed.end(call, self._clock(), loaded=loaded)

    def _record(self, namespace: bytes) -> LoadSteps[NamespaceRecord | None]:
        for store in self._stores:
            value = bytearray(RECORD_BYTES)
            yield AskNext(store)
            try:
                store.spare_the_request("get_into")
                found = store.get([record_key(namespace)], [memoryview(value)])
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


def _batches(
    wanted: Sequence[int], source: Mapping[int, L2Store], sizes: Sequence[int], at_once: Mapping[L2Store, int]
) -> list[list[int]]:
    """Split into runs of indices with one source each, bounded in number and bytes: the threads of a tier get as much
    each."""
    totals: Counter[L2Store] = Counter()
    for index in wanted:
        totals[source[index]] += sizes[index] * source[index].scale
    most = {store: _share(nbytes, at_once[store]) for store, nbytes in totals.items()}
    batches: list[list[int]] = []
    total = 0
    for index in wanted:
        last = batches[-1] if batches else None
        store = source[index]
        nbytes = sizes[index] * store.scale
        if last is None or source[last[-1]] is not store or len(last) >= BATCH_OBJECTS or total + nbytes > most[store]:
            batches.append([index])
            total = nbytes
        else:
            last.append(index)
            total += nbytes
    return batches


def _share(nbytes: int, threads: int) -> int:
    """Return the bytes of a batch, so that each thread has as many batches."""
    turns = max(-(-nbytes // (BATCH_BYTES * threads)), 1)
    return min(max(-(-nbytes // (turns * threads)), LEAST_BYTES), BATCH_BYTES)
