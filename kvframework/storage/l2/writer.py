"""The writer of one L2 tier: its write policy, the queue of objects that wait, and the batches that are sent.

Objects are pinned only while they are being sent; waiting ones may be evicted and are then counted as lost. A full
queue drops new objects with a count, so a slow or dead tier never delays a STORE."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from kvframework.api.keys import PackedKey
from kvframework.config.schema import WritePolicyName
from kvframework.errors import TierError
from kvframework.storage.l1.entries import StoredObject
from kvframework.storage.l2.sealed_tier import L1, L2Store
from kvframework.storage.l2.tier_calls import CircuitOpen
from kvframework.storage.namespaces import NamespaceRecords, record_key

log = logging.getLogger(__name__)

# Keys that left L1 after one use, remembered so that another store counts as the second use.
MAX_GHOSTS = 1 << 14


class WritePolicy:
    """Which objects go to an L2 tier, and when: each method takes an event of L1 and returns the keys to write. Pure.

    * `write_through`: each object as soon as it is committed.
    * `write_through_selective`: at its second use, so that an object used only once costs the tier nothing.
    * `write_back`: at its eviction from L1, so that the tier holds objects that L1 does not.
    """

    def __init__(self, name: WritePolicyName = "write_through") -> None:
        self.name = name
        # Whether `used`, `leaving`, `removed` and `written` matter to the policy; they are not called otherwise.
        self.watches_l1 = name != "write_through"
        # The objects of L1 that were used once, or not written yet.
        self._open: set[PackedKey] = set()
        self._ghosts: OrderedDict[PackedKey, None] = OrderedDict()

    def committed(self, keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
        """Objects that an engine stored."""
        if self.name == "write_through":
            return keys
        again = [key for key in keys if key in self._ghosts]
        for key in again:
            del self._ghosts[key]
        self._open.update(set(keys).difference(again))
        return again

    def promoted(self, keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
        """Objects that were loaded from a later tier."""
        return self.committed(keys) if self.name == "write_back" else keys

    def used(self, keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
        """Objects of L1 that were looked up, read, or stored again."""
        if self.name != "write_through_selective":
            return ()
        again = [key for key in keys if key in self._open]
        self._open.difference_update(again)
        return again

    def leaving(self, keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
        """Objects that L1 is about to evict; it keeps the returned ones until they are written."""
        return [key for key in keys if key in self._open] if self.name == "write_back" else ()

    def written(self, keys: Iterable[PackedKey]) -> None:
        """Objects whose writing is over: stored, or given up."""
        self._open.difference_update(keys)

    @property
    def unwritten(self) -> Collection[PackedKey]:
        """The objects of L1 that this policy has not written yet."""
        return self._open if self.watches_l1 else ()

    def removed(self, key: PackedKey) -> bool:
        """An object has left L1; returns True if it was still to be written."""
        if key not in self._open:
            return False
        self._open.discard(key)
        if self.name == "write_back":
            return True
        self._ghosts[key] = None
        if len(self._ghosts) > MAX_GHOSTS:
            self._ghosts.popitem(last=False)
        return False


BATCH_OBJECTS = 16
# How often a batch of one object may fail as a whole, and how often the tier may refuse one object of a batch.
MAX_ATTEMPTS = 8
MAX_REFUSALS = 3
REFUSED_PAUSE_S = 0.5


# The keys that one writer has taken, in their order. Two batches are one only if they are the same list.
Batch = list[PackedKey]


class WriteQueue:
    """Objects that wait, are being sent, or were refused and wait for another attempt. Pure; its caller serialises.

    Each accepted object ends in one way: written, lost (it left L1 before), or given up; objects offered beyond the
    `bound` of those that wait are dropped. `writers` batches may be in flight, and an object is in one of them at most.
    Objects that a batch could not send wait again beyond the bound, so at most the bound and the batches in flight are
    pending. `count` adds to counters by name: `write_dropped`, `write_lost`, `write_given_up`."""

    def __init__(self, policy: WritePolicy, bound: int, count: Callable[..., None], writers: int = 1) -> None:
        self.policy = policy
        self.bound = bound
        self._writers = writers
        self._count = count
        self._waiting: OrderedDict[PackedKey, None] = OrderedDict()
        # Keys taken for a batch and not settled; each batch's in its order.
        self._sending: dict[PackedKey, Batch] = {}
        # The time of each next attempt, the soonest first; and the number of refusals.
        self._refused: dict[PackedKey, float] = {}
        self._refusals: Counter[PackedKey] = Counter()
        self._at_once = BATCH_OBJECTS
        # For keys of batches that failed as a whole: the size of their next batch, and how often each failed alone.
        self._most: dict[PackedKey, int] = {}
        self._attempts: Counter[PackedKey] = Counter()
        # Objects that were given up since a drain began, None without one.
        self.given_up: set[PackedKey] | None = None

    @property
    def keys(self) -> set[PackedKey]:
        return {*self._waiting, *self._sending, *self._refused}

    @property
    def pending(self) -> int:
        return len(self._waiting) + len(self._sending) + len(self._refused)

    @property
    def space(self) -> int:
        return max(self.bound - len(self._waiting) - len(self._refused), 0)

    def wait_s(self, now: float) -> float:
        """Return the seconds until there is something to send; infinite if nothing waits."""
        if self._waiting:
            return 0.0
        return max(next(iter(self._refused.values()), math.inf) - now, 0.0)

    def offer(self, keys: Iterable[PackedKey]) -> None:
        for key in keys:
            if not self.holds(key):
                if self.space:
                    self._waiting[key] = None
                else:
                    self._count(write_dropped=1)

    def leaving(self, keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
        """Return those of `keys` that L1 must keep until they are written; queued, as far as there is space."""
        unwritten = self.policy.leaving(keys)
        fresh = [key for key in unwritten if not self.holds(key)]
        self.offer(fresh[: self.space])
        return unwritten

    def removed(self, key: PackedKey) -> None:
        """An object has left L1."""
        if self.policy.removed(key):
            self._waiting.pop(key, None)
            self._sending.pop(key, None)
            self._lost([key])

    def take(self, now: float) -> Batch:
        """Return the next batch, one writer's fair share of what waits; its keys count as sent until settled."""
        for key in [key for key, due in self._refused.items() if due <= now]:
            del self._refused[key]
            self._waiting[key] = None
        batch: Batch = []
        most = min(self._at_once, -(-len(self._waiting) // self._writers))
        for key in self._waiting:
            most = min(most, self._most.get(key, most))
            if len(batch) >= most:
                break
            batch.append(key)
        for key in batch:
            del self._waiting[key]
            self._sending[key] = batch
        return batch

    def found(self, batch: Batch, keys: Sequence[PackedKey]) -> list[PackedKey]:
        """Return those of `keys`, the pinned objects of the batch, that this batch sends. Of those that were lost since
        it was taken and stored again these wait: those that no other batch took or settled, and not dropped."""
        here = set(keys)
        lost = [key for key in self._unsettled(batch) if key not in here]
        for key in lost:
            del self._sending[key]
        self._lost(lost)
        mine = [key for key in keys if self._sending.get(key) is batch or key in self._waiting]
        for key in mine:
            # Includes a key that was lost and stored again since the batch was taken.
            self._waiting.pop(key, None)
            self._sending[key] = batch
        return mine

    def answered(self, keys: Sequence[PackedKey], stored: Sequence[bool], now: float) -> None:
        """Record the tier's answer for each key. The caller still pins them: an object that may be evicted and counts
        as unwritten would be sent again, or counted as lost."""
        self._at_once = min(self._at_once * 2, BATCH_OBJECTS)
        for key, ok in zip(keys, stored, strict=True):
            if ok:
                self._settle(key)
                continue
            self._refusals[key] += 1
            if self._refusals[key] < MAX_REFUSALS:
                del self._sending[key]
                self._refused[key] = now + REFUSED_PAUSE_S
            else:
                self.give_up([key])

    def failed(self, keys: Sequence[PackedKey]) -> bool:
        """Record that the tier failed at all of these as a whole. Smaller batches fit a slow tier's deadline, and
        separate values that can never be written from the others. Returns True for one object that failed alone so
        often that it should be given up, unless the tier fails at everything."""
        self._at_once = max(self._at_once // 2, 1)
        if len(keys) > 1:
            self._most.update(dict.fromkeys(keys, len(keys) // 2))
            return False
        self._attempts[keys[0]] += 1
        return self._attempts[keys[0]] % MAX_ATTEMPTS == 0

    def give_up(self, keys: Iterable[PackedKey]) -> None:
        """Give up keys that would never be stored."""
        for key in keys:
            self._settle(key)
            self._count(write_given_up=1)
            if self.given_up is not None:
                self.given_up.add(key)

    def give_up_batch(self, batch: Batch) -> None:
        """Give up a batch that met a bug, and would meet it again."""
        self.give_up(self._unsettled(batch))

    def _lost(self, keys: Sequence[PackedKey]) -> None:
        for key in keys:
            self._forget_failures(key)
        if keys:
            self._count(write_lost=len(keys))

    def put_back(self, batch: Batch) -> None:
        """End a batch; its unsettled keys are sent next."""
        for key in reversed(self._unsettled(batch)):
            del self._sending[key]
            self._waiting[key] = None
            self._waiting.move_to_end(key, last=False)

    def holds(self, key: PackedKey) -> bool:
        return key in self._waiting or key in self._refused or key in self._sending

    def _unsettled(self, batch: Batch) -> list[PackedKey]:
        return [key for key, taken in self._sending.items() if taken is batch]

    def _settle(self, key: PackedKey) -> None:
        del self._sending[key]
        self._forget_failures(key)
        if self.policy.watches_l1:
            self.policy.written([key])

    def _forget_failures(self, key: PackedKey) -> None:
        self._refused.pop(key, None)
        self._refusals.pop(key, None)
        self._most.pop(key, None)
        self._attempts.pop(key, None)


BATCH_BYTES = 64 << 20
# Niceness of threads that write for a drain, so that the serving thread waits for no core: with it a LOOKUP beside them
# took 1 instead of 5 ms at p90, and 14 instead of 35 ms at p99, on two busy cores.
DRAIN_NICE = 10
RECORD_EVERY_S = 30.0
# How often the records of namespaces with engines are put, though nothing else is.
RENEW_EVERY_S = 3600.0
IDLE_WORK_EVERY_S = 5.0
MAX_TOUCHES = 1 << 16
# So that no more than this comes between two writes.
TOUCH_AT_ONCE = 1024


@dataclass(frozen=True)
class AttachedTier:
    """One `[[l2]]`: a store and its settings. `promote` means that it also receives values found in a later tier.
    `loads` and `writes` bound the batches that are loaded and written at once; `shares` are the least and the most of
    its capacity that each tenant has, see `Shares`."""

    store: L2Store
    write_policy: WritePolicyName = "write_through"
    write_queue: int = 1024
    promote: bool = True
    loads: int = 2
    writes: int = 1
    shares: tuple[Sequence[float], Sequence[float], Sequence[str], Sequence[int]] = ((0.0,), (1.0,), ("",), (0,))


class TierWriter:
    """Thread-safe; only `drain` blocks. L1 reports events, also under the storage lock, which comes before `changed`.
    One or several storage threads (`tiers.py`) drive it, each with its own batch."""

    def __init__(
        self, l1: L1, tier: AttachedTier, records: NamespaceRecords, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.store = store = tier.store
        self.name = f"writer-{store.name}"
        self.promote = tier.promote
        self.changed = threading.Condition()
        self.closing = False
        self._l1 = l1
        self._records = records
        self._policy = WritePolicy(tier.write_policy)
        self._queue = WriteQueue(self._policy, tier.write_queue, store.count, tier.writes)
        self._clock = clock
        self.watches_removals = self._policy.watches_l1 and not store.read_only
        self.watches_uses = self.watches_removals or store.wants_touches
        # While the server drains: the objects of L1, the most recently used first.
        self._rest: Iterator[PackedKey] | None = None
        # Time of the last put of each namespace's record, or of its beginning.
        self._record_put: dict[bytes, float] = {}
        self._renewed_at = clock()
        self._touches: dict[PackedKey, None] = {}
        self._touching: list[PackedKey] = []
        # Promises that are asked for, see `L2Store.keep`.
        self._promises: dict[PackedKey, tuple[int, float, int]] = {}
        self._idle_work_at = 0.0
        # Only one thread at a time does touches and checks.
        self._in_background = False

    @property
    def pending(self) -> int:
        """Number of objects that wait or are being sent."""
        return self._queue.pending

    def status(self) -> dict[str, object]:
        policy = "none" if self.store.read_only else self._policy.name
        return {"write_policy": policy, "promote": self.promote, "write_pending": self.pending}

    def configure(self, *, queue: int, promote: bool) -> None:
        """Change the bound of the queue, whose objects stay, and whether promoted objects are written."""
        with self.changed:
            self._queue.bound = queue
            self.promote = promote

    def committed(self, keys: Sequence[PackedKey]) -> None:
        """Objects that an engine stored."""
        with self.changed:
            self._offer(self._policy.committed(keys))

    def promoted(self, keys: Sequence[PackedKey]) -> None:
        """Objects that a later tier had."""
        if self.promote:
            with self.changed:
                self._offer(self._policy.promoted(keys))

    def used(self, keys: Sequence[PackedKey]) -> None:
        """Objects of L1 that were looked up, read, stored again, or loaded from this tier."""
        with self.changed:
            if self._rest is None:
                self._offer([*self._policy.used(keys), *self.store.stale.intersection(keys)])
                self.store.stale.difference_update(keys)
            if self.store.wants_touches and len(self._touches) < MAX_TOUCHES:
                self._touches.update(dict.fromkeys(keys))

    def leaving(self, keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
        """Return those of `keys` that L1 must keep until they are written; queued as far as there is space."""
        with self.changed:
            self.changed.notify_all()
            return self._queue.leaving(keys)

    def removed(self, key: PackedKey) -> None:
        with self.changed:
            self._queue.removed(key)

    def promised(self, keys: Sequence[PackedKey], seconds: float, priority: int) -> None:
        """Ask the tier to keep objects of L1 for so long from now on, also those that it lacks yet."""
        with self.changed:
            if "admit" in self.store.capabilities and len(self._promises) < MAX_TOUCHES:
                self._promises.update(dict.fromkeys(keys, (0, time.time() + seconds, priority)))
            else:
                self.store.count(promise_refused=len(keys))

    def _keep_promises(self) -> None:
        with self.changed:
            written = [key for key in self._promises if not self._queue.holds(key)]
            first = sorted(written, key=lambda key: -self._promises[key][2])[:TOUCH_AT_ONCE]
            promises = {key: self._promises[key] for key in first}
        lacking = self.store.keep(promises)
        here = self._l1.which_present(lacking)
        with self.changed:
            again = [key for key, ok in zip(lacking, here, strict=True) if ok]
            for key in promises.keys() - again:
                self._promises.pop(key)
            self._offer(again)

    def order_rest(self, order: Iterable[PackedKey] | None) -> None:
        """Begin a drain: `write_rest` takes the objects of L1 in this order. None ends it."""
        with self.changed:
            self._rest, self._queue.given_up = (None, None) if order is None else (iter(order), set())

    def write_rest(self) -> bool:
        """Queue what L1 holds and the tier does not, as far as there is space; return whether anything is left."""
        with self.changed:
            rest, space = self._policy.unwritten, self._queue.space
            if rest and not self.closing:
                first = list(islice((key for key in self._rest or () if key in rest), space))
                self._queue.offer(first or list(rest)[:space])
                self.changed.notify_all()
            return bool(rest or self.pending)

    def left(self) -> set[PackedKey]:
        """Return the objects that the tier has not got yet, or that it refused during a drain."""
        with self.changed:
            return {*self._policy.unwritten, *self._queue.keys, *(self._queue.given_up or ())}

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is pending; return False after `timeout_s`."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.pending, timeout_s)

    def stop(self) -> None:
        """Stop sending after the call in flight. Does not wait."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def wait_s(self) -> float:
        """Return the seconds until there is work that a circuit admits."""
        now = self._clock()
        with self.changed:
            return min(self._sending_s(now), math.inf if self._in_background else max(self._idle_work_at - now, 0.0))

    def poll(self) -> Callable[[], None] | None:
        """Return the next unit of work for this caller, None when idle. Several may run at once."""
        now = self._clock()
        with self.changed:
            if self.closing:
                return None
            batch = self._queue.take(now) if self._sending_s(now) <= 0 else None
            background = not self._in_background and self._idle_work_at <= now
            self._in_background |= background
            return partial(self._turn, batch, background) if batch is not None or background else None

    def _sending_s(self, now: float) -> float:
        waiting_s = self._queue.wait_s(now)
        return waiting_s if waiting_s == math.inf else max(waiting_s, self.store.wait_s(*self.store.writing))

    def _turn(self, batch: Batch | None, background: bool) -> None:
        if self._rest is not None:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), DRAIN_NICE)
        try:
            if batch is not None:
                self._send_batch(batch)
            if background and not self.closing:
                self._work_in_background()
        finally:
            if background:
                with self.changed:
                    self._in_background = False
                    self.changed.notify_all()

    def _work_in_background(self) -> None:
        """Check the tier and renew records, or send one batch of touches: of used objects and namespaces' records."""
        if not self._touching:
            self.store.check()
            self._renew_records()
            with contextlib.suppress(TierError):  # the next time will do
                self._keep_promises()
            with self.changed:
                touches, self._touches = self._touches, {}
            self._touching = [*map(record_key, sorted(_namespaces(touches))), *touches]
        batch, self._touching = self._touching[:TOUCH_AT_ONCE], self._touching[TOUCH_AT_ONCE:]
        try:
            if batch:
                self.store.touch(batch)
        except TierError:
            self._touching = []
        self._idle_work_at = self._clock() + (0.0 if self._touching else IDLE_WORK_EVERY_S)

    def _offer(self, keys: Sequence[PackedKey]) -> None:
        if self.store.read_only:
            return
        if self.closing:
            self.store.count(write_dropped=len(keys))
        elif keys:
            self._queue.offer(keys)
            self.changed.notify_all()

    def _send_batch(self, batch: Batch) -> None:
        pinned: dict[PackedKey, StoredObject] = {}
        try:
            pinned = {stored.key: stored for stored in self._l1.pin_present(batch)}
            with self.changed:
                mine = set(self._queue.found(batch, list(pinned)))
            self._l1.release([pinned.pop(key) for key in [*pinned] if key not in mine])
            answered = True
            while pinned and answered and not self.closing:
                answered = self._send_group(_take_bytes(pinned, BATCH_BYTES // self.store.scale))
        except Exception:
            with self.changed:
                self._queue.give_up_batch(batch)
            raise
        finally:
            self._l1.release(list(pinned.values()))
            with self.changed:
                self._queue.put_back(batch)
                self.changed.notify_all()

    def _send_group(self, group: Sequence[StoredObject]) -> bool:
        """Send a group; return whether the tier answered. `group` is unpinned in any case."""
        keys = [stored.key for stored in group]
        try:
            written = self._put(keys, [self._l1.bytes_of(stored) for stored in group])
            with self.changed:
                self._queue.answered(keys, written, self._clock())
            return True
        except CircuitOpen:
            return False
        except TierError:
            with self.changed:
                hopeless = self._queue.failed(keys)
            if hopeless and self.store.answers():
                with self.changed:
                    self._queue.give_up(keys)
            return False
        finally:
            self._l1.release(group)

    def _put(self, keys: Sequence[PackedKey], values: Sequence[memoryview]) -> list[bool]:
        try:
            for namespace in sorted(_namespaces(keys)):
                self._put_record(namespace)
            return self.store.put(keys, values)
        finally:
            for value in values:
                value.release()

    def _renew_records(self) -> None:
        """Tell `kvframework tiers gc`, once in a while, that namespaces are in use of which nothing is written."""
        if self.store.read_only or self._clock() - self._renewed_at < RENEW_EVERY_S:
            return
        self._renewed_at = self._clock()
        with contextlib.suppress(TierError):  # the next hour's will do
            for namespace in self._records.retained():
                self._put_record(namespace)

    def _put_record(self, namespace: bytes) -> None:
        """Put the namespace's record, unless that was done lately."""
        now = self._clock()
        with self.changed:
            if now - self._record_put.get(namespace, -math.inf) < RECORD_EVERY_S:
                return
            self._record_put = {each: at for each, at in self._record_put.items() if now - at < RECORD_EVERY_S}
            # Set at once, so that no two writers put it: the older record might be written last.
            self._record_put[namespace] = now
        stored = False
        try:
            record = self._records.encoded(namespace)
            if record is not None:
                stored = self.store.put([record[0]], [record[1]])[0]
        finally:
            if not stored:
                with self.changed:
                    self._record_put.pop(namespace, None)


def _namespaces(keys: Iterable[PackedKey]) -> set[bytes]:
    return {key[:16] for key in keys}


def _take_bytes(pinned: dict[PackedKey, StoredObject], most: int) -> list[StoredObject]:
    """Move as many objects as have `most` bytes, at least one."""
    group: list[StoredObject] = []
    for stored in [*pinned.values()]:
        most -= stored.length
        if group and most < 0:
            break
        group.append(pinned.pop(stored.key))
    return group
