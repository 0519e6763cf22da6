"""The writer of one L2 tier: reports of L1 enter its queue, and batches leave it for the tier.

The write policy decides which objects are written, and when; the queue is in `write_queue.py`. Objects are pinned only
while they are being sent; waiting ones may be evicted and are then counted as lost. A full queue drops new objects with
a count, so a slow or dead tier never delays a STORE. Driven by one or several storage threads (`threads.py`), each with
its own batch. Lock order: the storage lock, then `changed`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from kvframework.api.keys import PackedKey
from kvframework.errors import TierError
from kvframework.storage.l1.leases import PinLease
from kvframework.storage.l2.l1_interface import L1
from kvframework.storage.l2.sealed_tier import L2Store
from kvframework.storage.l2.steps import Steps, do
from kvframework.storage.l2.tier_calls import CircuitOpen
from kvframework.storage.l2.write_policy import WritePolicy, WriteThrough
from kvframework.storage.l2.write_queue import Batch, WriteQueue
from kvframework.storage.namespaces import NamespaceRecords, record_key

log = logging.getLogger(__name__)

BATCH_BYTES = 64 << 20
RECORD_EVERY_S = 30.0
IDLE_WORK_EVERY_S = 5.0
MAX_TOUCHES = 1 << 16
TOUCH_AT_ONCE = 1024


class TierWriter:
    """Thread-safe; only `drain` blocks. Events may be reported under the storage lock."""

    def __init__(
        self,
        l1: L1,
        store: L2Store,
        records: NamespaceRecords,
        *,
        policy: WritePolicy | None = None,
        queue: int = 1024,
        promote: bool = True,
        writers: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = f"writer-{store.name}"
        self.store = store
        self.promote = promote
        self.changed = threading.Condition()
        self.closing = False
        self._l1 = l1
        self._records = records
        self._policy = policy or WriteThrough()
        self._queue = WriteQueue(self._policy, queue, store.count, writers)
        self._clock = clock
        # Time of the last put of each namespace's record, or of its beginning.
        self._record_put: dict[bytes, float] = {}
        self._touches: dict[PackedKey, None] = {}
        self._touching: list[PackedKey] = []
        self._idle_work_at = 0.0
        # Only one thread at a time does touches and checks.
        self._aside = False

    @property
    def pending(self) -> int:
        """Number of objects that wait or are being sent."""
        return self._queue.pending

    def status(self) -> dict[str, object]:
        return {"write_policy": self._policy.name, "promote": self.promote, "write_pending": self.pending}

    def configure(self, *, queue: int, promote: bool) -> None:
        """Change the bound of the queue, whose objects stay, and whether promoted objects are written."""
        with self.changed:
            self._queue.bound = queue
            self.promote = promote

    @property
    def watches_removals(self) -> bool:
        return self._policy.watches_l1

    @property
    def watches_uses(self) -> bool:
        return self._policy.watches_l1 or self.store.wants_touches

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
            self._offer(self._policy.used(keys))
            if self.store.wants_touches and len(self._touches) < MAX_TOUCHES:
                self._touches.update(dict.fromkeys(keys))

    def leaving(self, keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
        """Return those of `keys` that L1 must keep until they are written; they are queued as far as there is room."""
        with self.changed:
            self.changed.notify_all()
            return self._queue.leaving(keys)

    def removed(self, key: PackedKey) -> None:
        """An object has left L1."""
        with self.changed:
            self._queue.removed(key)

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is pending; return False after `timeout_s`."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.pending, timeout_s)

    def stop(self) -> None:
        """Stop sending after the call in flight. Does not wait."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    # driven by storage threads

    def wait_s(self) -> float:
        """Return the seconds until there is work that a circuit admits."""
        now = self._clock()
        with self.changed:
            return min(self._sending_s(now), math.inf if self._aside else self._aside_s(now))

    def poll(self) -> Steps[None] | None:
        """Return the next unit of work for this caller, None when idle. Several may run at once."""
        now = self._clock()
        with self.changed:
            if self.closing:
                return None
            batch = self._queue.take(now) if self._sending_s(now) <= 0 else None
            aside = not self._aside and self._aside_s(now) <= 0
            self._aside |= aside
            return self._turn(batch, aside) if batch is not None or aside else None

    def _sending_s(self, now: float) -> float:
        waiting_s = self._queue.wait_s(now)
        return waiting_s if waiting_s == math.inf else max(waiting_s, self.store.wait_s())

    def _aside_s(self, now: float) -> float:
        idle_s = max(self._idle_work_at - now, 0.0)
        return min(idle_s, self.store.wait_s("touch")) if self._touching else idle_s

    def _turn(self, batch: Batch | None, aside: bool) -> Steps[None]:
        try:
            if batch is not None:
                yield from self._send_batch(batch)
            if aside and not self.closing:
                yield from self._work_aside()
        finally:
            if aside:
                with self.changed:
                    self._aside = False
                    self.changed.notify_all()

    def _work_aside(self) -> Steps[None]:
        if self._touching and self.store.wait_s("touch") <= 0:
            yield from self._send_touches()
        elif self._clock() >= self._idle_work_at:
            yield from self.store.check_steps()
            self._collect_touches()
            self._idle_work_at = self._clock() + IDLE_WORK_EVERY_S

    def _offer(self, keys: Sequence[PackedKey]) -> None:
        if self.closing:
            self.store.count(write_dropped=len(keys))
        elif keys:
            self._queue.offer(keys)
            self.changed.notify_all()

    def _send_batch(self, batch: Batch) -> Steps[None]:
        leases: list[PinLease] = []
        try:
            leases = yield from do(self._l1.pin_present, batch.keys)
            with self.changed:
                mine = set(self._queue.found(batch, [lease.objects[0].key for lease in leases]))
            if len(mine) < len(leases):
                others = [lease for lease in leases if lease.objects[0].key not in mine]
                leases = [lease for lease in leases if lease.objects[0].key in mine]
                self._l1.unpin_internal(others)
            answered = True
            while leases and answered and not self.closing:
                answered = yield from self._send_group(_take_bytes(leases, BATCH_BYTES // self.store.scale))
        except Exception:
            with self.changed:
                self._queue.give_up_batch(batch)
            raise
        finally:
            self._l1.unpin_internal(leases)
            with self.changed:
                self._queue.put_back(batch)
                self.changed.notify_all()

    def _send_group(self, group: Sequence[PinLease]) -> Steps[bool]:
        """Send a group; return whether the tier answered. `group` is unpinned in any case."""
        keys = [lease.objects[0].key for lease in group]
        try:
            stored = yield from self._put(keys, [self._l1.bytes_of(lease) for lease in group])
            with self.changed:
                self._queue.answered(keys, stored, self._clock())
            return True
        except CircuitOpen:
            return False
        except TierError:
            with self.changed:
                hopeless = self._queue.failed(keys)
            if hopeless and (yield from self.store.answers_steps()):
                with self.changed:
                    self._queue.give_up(keys)
            return False
        finally:
            self._l1.unpin_internal(group)

    def _put(self, keys: Sequence[PackedKey], values: Sequence[memoryview]) -> Steps[list[bool]]:
        try:
            for namespace in sorted(_namespaces(keys)):
                if self._wants_record(namespace):
                    yield from self._put_record(namespace)
            return (yield from self.store.put_steps(keys, values))
        finally:
            for value in values:
                value.release()

    def _wants_record(self, namespace: bytes) -> bool:
        """Whether to put the namespace's record now; if so, it counts as put."""
        now = self._clock()
        with self.changed:
            if now - self._record_put.get(namespace, -math.inf) < RECORD_EVERY_S:
                return False
            self._record_put = {each: at for each, at in self._record_put.items() if now - at < RECORD_EVERY_S}
            # Set at once, so that no two writers put it: the older record might be written last.
            self._record_put[namespace] = now
            return True

    def _put_record(self, namespace: bytes) -> Steps[None]:
        """Put the namespace's record."""
        stored = False
        try:
            record = self._records.encoded(namespace)
            if record is not None:
                stored = (yield from self.store.put_steps([record[0]], [record[1]]))[0]
        finally:
            if not stored:
                with self.changed:
                    self._record_put.pop(namespace, None)

    def _collect_touches(self) -> None:
        """Collect the used objects and their namespaces' records, which the tier must keep."""
        with self.changed:
            touches, self._touches = self._touches, {}
        self._touching = [*map(record_key, sorted(_namespaces(touches))), *touches]

    def _send_touches(self) -> Steps[None]:
        """Send one batch of touches, so that no more than this comes between two writes."""
        batch, self._touching = self._touching[:TOUCH_AT_ONCE], self._touching[TOUCH_AT_ONCE:]
        try:
            yield from self.store.touch_steps(batch)
        except TierError:
            self._touching = []


def _namespaces(keys: Iterable[PackedKey]) -> set[bytes]:
    return {key[:16] for key in keys}


def _take_bytes(leases: list[PinLease], most: int) -> list[PinLease]:
    """Move as many leases as have `most` bytes, at least one."""
    group = [leases.pop(0)]
    total = group[0].objects[0].length
    while leases and total + leases[0].objects[0].length <= most:
        total += leases[0].objects[0].length
        group.append(leases.pop(0))
    return group
