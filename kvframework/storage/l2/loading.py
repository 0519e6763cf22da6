"""The steps of one load: which tier is asked for which objects, and the reaction to losses.

A load is a generator, since it goes from a thread of one tier to one of another. Three kinds of step direct its driver:
a tier before the calls to it, so that a thread of this tier makes them, `WaitForWriters`, which needs no thread, and
`Apart`, the batches of a load, which several threads fetch at once. Reservations and pins of a load end with it."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TypeVar

from kvframework.api.listener import TierCall
from kvframework.api.requests import PackedKey, PrefetchTask, Select
from kvframework.errors import TierError
from kvframework.storage.l1.entries import StoredObject
from kvframework.storage.l1.leases import NO_PROMPT, PromptPart
from kvframework.storage.l2.sealed_tier import L1, L2Store
from kvframework.storage.namespaces import NamespaceRecord, NamespaceRecords

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
class WaitForWriters:
    """The load continues once other writers of `keys` have ended, or after `timeout_s`; without keys only then."""

    keys: Sequence[PackedKey]
    timeout_s: float


@dataclass(frozen=True)
class Apart:
    """The load continues once all these steps have ended, each driven by itself, several at once; they begin in this
    order. The first exception of any is thrown into the load then."""

    parts: Sequence[LoadSteps[None]]


# When a load may begin, of the clock, and its bytes per second.
Pace = tuple[float, float]
# Learns, once the tiers have said what they have, which objects L1 has and where each of the others is. Returns the
# pace of the load, None for any.
Located = Callable[[Sequence[bool], Mapping[int, L2Store]], Pace | None]
LoadSteps = Generator[L2Store | WaitForWriters | Apart, None, R]


@dataclass(eq=False)
class LoadTask(PrefetchTask):
    """One load. `done` turns True after `on_done` and all callbacks have run; `loaded` counts objects, and `calls` are
    its first `MAX_CALLS` calls to tiers. `decided` turns True once the tiers have said what they have. `on_change` is
    called in a storage thread after that, when objects have arrived, and at the end; it must not block. `located` is
    called there, too, before the first `select`. `prompt` says where the objects are, for the eviction policy; `client`
    is the session that looks them up, 0 for none. One `ahead` of its request comes last."""

    keys: Sequence[PackedKey]
    sizes: Sequence[int]
    select: Select
    on_change: Callable[[], object] = lambda: None
    located: Located | None = None
    prompt: PromptPart = NO_PROMPT
    client: int = 0
    ahead: bool = False
    decided: bool = field(default=False, init=False)
    done: bool = field(default=False, init=False)
    loaded: int = field(default=0, init=False)
    cancelled: bool = field(default=False, init=False)
    calls: list[TierCall] = field(default_factory=list, init=False)
    # Bytes that wait to be loaded, by tier.
    waiting_bytes: dict[L2Store, int] = field(default_factory=dict, init=False)
    pins: list[StoredObject] = field(default_factory=list, init=False)
    fetched: list[StoredObject] = field(default_factory=list, init=False)
    # No tier returned an object that was chosen: what hangs on it would be loaded for nothing.
    lost: bool = field(default=False, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _callbacks: list[Callable[[], object]] | None = field(default_factory=list, init=False)

    def add_done_callback(self, call: Callable[[], object]) -> None:
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(call)
                return
        _call(call)

    def arrived(self, objects: int) -> None:
        with self._lock:
            self.loaded += objects
        if objects:
            _call(self.on_change)

    def no_longer(self, store: L2Store, nbytes: int | None = None) -> None:
        """So many bytes of a tier wait no longer, None: no byte of it does."""
        with store.pricing:
            waiting = self.waiting_bytes.get(store, 0)
            gone = waiting if nbytes is None else min(nbytes, waiting)
            self.waiting_bytes[store] = waiting - gone
            store.speed.queued_bytes -= gone

    def end(self) -> None:
        """Run the callbacks; a callback added later runs at once."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks or [], None
        for call in callbacks:
            _call(call)

    def cancel(self) -> None:
        """End the load after the batch in flight; objects it has loaded stay in L1. `on_done` runs in any case."""
        self.cancelled = True


@dataclass(eq=False)
class Loader:
    """Makes the steps of loads; keeps no state of a load. `at_once` are the batches that are fetched at once from each
    tier, in the order of the tiers; `loaded` hears what came from one."""

    l1: L1
    at_once: Mapping[L2Store, int]
    records: NamespaceRecords
    loaded: Callable[[Sequence[PackedKey], L2Store], None]
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.stores = tuple(self.at_once)

    def load(self, task: LoadTask, on_done: Callable[[], None]) -> LoadSteps[None]:
        """Load, then run `on_done` once, in any case, while the chosen objects that were found are pinned."""
        try:
            yield from self._load_into(task)
        except Exception:
            log.exception("a load failed")
        try:
            on_done()
        finally:
            for store in self.stores:
                task.no_longer(store)
            task.end()
            if task.ahead:
                self.l1.loaded_ahead(task.fetched)
            self.l1.release(task.pins)
            task.done = True
            _call(task.on_change)
            # They refer to this task in turn.
            task.select, task.on_change, task.located = lambda _available: (), lambda: None, None

    def load_record(self, namespace: bytes, on_done: Callable[[], None]) -> LoadSteps[None]:
        """Read a namespace's record from the tiers, and add it to the records; `on_done` runs once, in any case."""
        try:
            record = yield from self._record(namespace)
            if record is not None:
                self.records.add(namespace, record, learned=True)
        except Exception:
            log.exception("the namespaces of a tier could not be read")
        on_done()

    def _load_into(self, task: LoadTask) -> LoadSteps[None]:
        available = self.l1.which_present(task.keys)
        missing = [index for index, here in enumerate(available) if not here]
        source = yield from self._locate(task, missing, self.stores)
        pace = None if task.located is None else task.located(tuple(available), source)
        for index in source:
            available[index] = True
        chosen = task.select(available)
        task.decided = True
        if source:
            _call(task.on_change)
        task.pins += self.l1.pin_present([task.keys[index] for index in chosen if index not in source])
        wanted: dict[L2Store, list[int]] = {}
        for index in chosen:
            if index in source:
                wanted.setdefault(source[index], []).append(index)
        most: dict[L2Store, int] = {}
        for store, indices in wanted.items():
            nbytes = store.scale * sum(task.sizes[index] for index in indices)
            most[store] = _batch_bytes(nbytes, self.at_once[store])
            if pace is None:  # others do not wait for bytes that wait for their time
                with store.pricing:
                    task.waiting_bytes[store] = nbytes
                    store.speed.queued_bytes += nbytes
        batches = _batches([index for index in chosen if index in source], source, task.sizes, most)
        at, rate = pace or (-math.inf, math.inf)
        sizes = [source[batch[0]].scale * sum(task.sizes[index] for index in batch) for batch in batches]
        parts = zip(batches, sizes, accumulate(sizes, initial=0), strict=False)
        if batches:
            yield Apart(
                [self._load_batch(task, source[b[0]], b, size, at + before / rate) for b, size, before in parts]
            )

    def _load_batch(
        self, task: LoadTask, store: L2Store, batch: Sequence[int], nbytes: int, begin_at: float
    ) -> LoadSteps[None]:
        try:
            if begin_at > self.clock() and not (task.lost or task.cancelled):
                yield store
                yield WaitForWriters((), begin_at - self.clock())
            if not (task.lost or task.cancelled):
                yield from self._load_from(task, store, batch)
        finally:
            task.no_longer(store, nbytes)

    def _locate(
        self, task: LoadTask, missing: Sequence[int], stores: Sequence[L2Store]
    ) -> LoadSteps[dict[int, L2Store]]:
        """Return, for each index, the first of `stores` that reports it."""
        source: dict[int, L2Store] = {}
        for store in stores:
            ask = [index for index in missing if index not in source]
            if not ask or task.cancelled:
                break
            yield store
            try:
                store.refuse_unless_closed("contains")
                asking = partial(store.contains, [task.keys[index] for index in ask])
                found = self._noted(task, store, "contains", len(ask), asking)
            except TierError:
                continue
            source.update((index, store) for index, yes in zip(ask, found, strict=True) if yes)
        return source

    def _load_from(self, task: LoadTask, store: L2Store, batch: Sequence[int]) -> LoadSteps[None]:
        """Load and pin a batch from `store`, and objects that it failed to return from later tiers. Objects that other
        tasks or clients write meanwhile are waited for."""
        yield store
        held, elsewhere = self._fetch(task, store, batch)
        if elsewhere:
            yield WaitForWriters([task.keys[index] for index in elsewhere], store.timeout_s)
            pins = self.l1.pin_present([task.keys[index] for index in elsewhere])
            task.pins += pins
            here = {stored.key for stored in pins}
            written = {index for index in elsewhere if task.keys[index] in here}
            held |= written
            abandoned = [index for index in elsewhere if index not in written]
            if abandoned and not task.cancelled:
                held |= self._fetch(task, store, abandoned)[0]
        lost = [index for index in batch if index not in held]
        if not lost or task.cancelled:
            return
        behind = self.stores[self.stores.index(store) + 1 :]
        source = yield from self._locate(task, lost, behind)
        task.lost |= len(source) < len(lost)
        for other in behind:
            again = [index for index in lost if source.get(index) is other]
            if again:
                yield from self._load_from(task, other, again)

    def _fetch(self, task: LoadTask, store: L2Store, batch: Sequence[int]) -> tuple[set[int], list[int]]:
        """Load and pin the objects with a place; return the indices of the loaded ones, and of the others."""
        places: list[tuple[int, str, memoryview]] = []
        good: list[bool] = []
        elsewhere: list[int] = []
        loaded: set[int] = set()
        try:
            store.refuse_unless_closed("get_into")
            for index in batch:
                part = PromptPart(task.prompt.of([index]), task.prompt.chunk_tokens)
                place = self.l1.reserve_load(task.keys[index], task.sizes[index], part, task.client)
                if place is None:
                    elsewhere.append(index)
                else:
                    places.append((index, *place))
            if places:
                getting = partial(self._get, task, store, places)
                good = self._noted(task, store, "get", len(places), getting)
        except TierError:
            log.debug("tier %s failed during a load", store.name)
        finally:
            for position, (index, lease_id, view) in enumerate(places):
                pins = self.l1.finish_load(lease_id, bool(good) and good[position])
                task.pins += pins
                if pins:
                    loaded.add(index)
                    task.fetched += pins
                view.release()
            self.loaded([task.keys[index] for index in batch if index in loaded], store)
            task.arrived(len(loaded))
        return loaded, elsewhere

    def _noted(
        self, task: LoadTask, store: L2Store, operation: str, values: int, call: Callable[[], list[bool]]
    ) -> list[bool]:
        began, answers = self.clock(), None
        try:
            answers = call()
            return answers
        finally:
            if len(task.calls) < MAX_CALLS:
                seconds, ok = self.clock() - began, answers is not None
                task.calls.append(TierCall(store.name, operation, began, seconds, values, sum(answers or ()), ok))

    def _get(self, task: LoadTask, store: L2Store, places: Sequence[tuple[int, str, memoryview]]) -> list[bool]:
        with store.pricing:
            began = store.speed.begin(self.clock())
        good: list[bool] = []
        try:
            good = store.get([task.keys[index] for index, _, _ in places], [view for _, _, view in places])
            return good
        finally:
            nbytes = sum([view.nbytes for _, _, view in places]) if good and all(good) else 0
            with store.pricing:
                store.speed.end(began, self.clock(), nbytes * store.scale)

    def _record(self, namespace: bytes) -> LoadSteps[NamespaceRecord | None]:
        for store in self.stores:
            yield store
            try:
                store.refuse_unless_closed("get_into")
                record = store.record(namespace)
            except TierError:
                continue
            if record is not None:
                return record
        return None


def _call(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:
        log.exception("a callback at the end of a load failed")


def _batches(
    wanted: Sequence[int], source: Mapping[int, L2Store], sizes: Sequence[int], most: Mapping[L2Store, int]
) -> list[list[int]]:
    """Split into runs of indices with one source each, bounded in number and, by tier, in bytes."""
    batches: list[list[int]] = []
    total = 0
    for index in wanted:
        store = source[index]
        nbytes = sizes[index] * store.scale
        last = batches[-1] if batches else []
        fits = bool(last) and source[last[-1]] is store and len(last) < BATCH_OBJECTS and total + nbytes <= most[store]
        if fits:
            last.append(index)
        else:
            batches.append([index])
        total = total + nbytes if fits else nbytes
    return batches


def _batch_bytes(nbytes: int, threads: int) -> int:
    """Return the most bytes of a batch, so that each thread has as many batches."""
    turns = max(-(-nbytes // (BATCH_BYTES * threads)), 1)
    return min(max(-(-nbytes // (turns * threads)), LEAST_BYTES), BATCH_BYTES)
