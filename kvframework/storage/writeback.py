"""Owns the way of objects from L1 to one L2 tier: a bounded queue and one thread per tier.

Which objects go, and when, is the write policy's. Only what is being sent is pinned; what waits in the queue may be
evicted and is then counted as lost. A full queue drops new objects with a count, so a slow or dead tier never delays a
STORE. Lock order: the storage lock, then this one's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvframework.api import PackedKey
from kvframework.errors import TierError
from kvframework.storage.l2 import L2Store
from kvframework.storage.leases import PinLease
from kvframework.storage.namespaces import NamespaceRecords, record_key
from kvframework.storage.write_policy import AtOnce, WritePolicy

log = logging.getLogger(__name__)

BATCH_OBJECTS = 16
BATCH_BYTES = 64 << 20
RECORD_EVERY_S = 30.0
MAX_ATTEMPTS = 8
IDLE_WORK_EVERY_S = 5.0
MAX_TOUCHES = 1 << 16
TOUCH_AT_ONCE = 1024


class PinnedSource(Protocol):
    """What write-back needs of L1."""

    def pin_present(self, keys: Sequence[PackedKey]) -> list[PinLease]: ...

    def unpin_internal(self, leases: Sequence[PinLease]) -> None: ...

    def bytes_of(self, lease: PinLease) -> memoryview: ...


class WriteBack:
    """Thread-safe; only `drain` and `join` block. Its events may be told under the storage lock."""

    def __init__(
        self,
        source: PinnedSource,
        store: L2Store,
        records: NamespaceRecords,
        *,
        policy: WritePolicy | None = None,
        queue: int = 1024,
        promote: bool = True,
    ) -> None:
        self.store = store
        self.promote = promote
        self._source = source
        self._records = records
        self._policy = policy or AtOnce()
        self._bound = queue
        self._record_put: dict[bytes, float] = {}
        self._queue: OrderedDict[PackedKey, None] = OrderedDict()
        self._touches: dict[PackedKey, None] = {}
        self._touching: list[PackedKey] = []
        self._idle_work_at = 0.0
        self._busy = 0
        self._at_once = BATCH_OBJECTS
        self._attempts = 0
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"kvf-writeback-{store.name}", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Objects queued or being sent."""
        return len(self._queue) + self._busy

    def status(self) -> dict[str, object]:
        return {"write_policy": self._policy.name, "promote": self.promote, "write_pending": self.pending}

    @property
    def watches_removals(self) -> bool:
        return self._policy.watches_l1

    @property
    def watches_uses(self) -> bool:
        return self._policy.watches_l1 or self.store.wants_touches

    def committed(self, keys: Sequence[PackedKey]) -> None:
        """Objects that an engine stored."""
        with self._changed:
            self._offer(self._policy.committed(keys))

    def promoted(self, keys: Sequence[PackedKey]) -> None:
        """Objects that a later tier had."""
        if self.promote:
            with self._changed:
                self._offer(self._policy.promoted(keys))

    def used(self, keys: Sequence[PackedKey]) -> None:
        """Objects of L1 that were looked up, read, stored again, or loaded from here."""
        with self._changed:
            self._offer(self._policy.used(keys))
            if self.store.wants_touches and len(self._touches) < MAX_TOUCHES:
                self._touches.update(dict.fromkeys(keys))

    def leaving(self, keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
        """Those of `keys` that L1 is to keep until they are written; they are queued as far as there is room."""
        with self._changed:
            waiting = self._policy.leaving(keys)
            fresh = [key for key in waiting if key not in self._queue]
            self._offer(fresh[: max(self._bound - len(self._queue), 0)])
            return waiting

    def removed(self, key: PackedKey) -> None:
        """An object has left L1."""
        with self._changed:
            if self._policy.removed(key):
                self._queue.pop(key, None)
                self.store.count(write_lost=1)

    def drain(self, timeout_s: float) -> bool:
        """Waits until nothing is pending; False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.pending, timeout_s)

    def stop(self) -> None:
        """Nothing more is sent after the call in flight. Does not wait."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Waits, after `stop`, for the thread to end; False if it has not within `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _offer(self, keys: Sequence[PackedKey]) -> None:
        if not keys:
            return
        room = 0 if self._closing else max(self._bound - len(self._queue), 0)
        self._queue.update(dict.fromkeys(keys[:room]))
        self._changed.notify_all()
        self.store.count(write_dropped=max(len(keys) - room, 0))

    def _run(self) -> None:
        while self._wait():
            try:
                if self._queue:
                    self._send_batch()
                if self._touching:
                    self._send_touches()
                elif time.monotonic() >= self._idle_work_at:
                    self.store.check()
                    self._collect_touches()
                    self._idle_work_at = time.monotonic() + IDLE_WORK_EVERY_S
            except Exception:
                log.exception("write-back to %s failed", self.store.name)

    def _wait(self) -> bool:
        """Waits for something to do that the circuit lets through; False once nothing is to be done any more."""
        with self._changed:
            while not self._closing:
                closed_for_s = self.store.wait_s()
                idle_s = self._idle_work_at - time.monotonic()
                pressing = bool(self._queue or self._touching)
                if closed_for_s <= 0 and (pressing or idle_s <= 0):
                    return True
                self._changed.wait(max(closed_for_s, 0.0 if pressing else idle_s))
            return False

    def _send_batch(self) -> None:
        with self._changed:
            keys = [self._queue.popitem(last=False)[0] for _ in range(min(len(self._queue), self._at_once))]
            self._busy = len(keys)
        leases: list[PinLease] = []
        again: list[PackedKey] = []
        try:
            leases = self._source.pin_present(keys)
            self.store.count(write_lost=len(keys) - len(leases))
            while leases and not again and not self._closing:
                group = _take_bytes(leases)
                sent = [lease.objects[0].key for lease in group]
                try:
                    self._put(sent, [self._source.bytes_of(lease) for lease in group])
                    self._at_once, self._attempts = min(self._at_once * 2, BATCH_OBJECTS), 0
                    self._settled(sent)
                except TierError:
                    again = self._after_failure(sent)
                    if not again:
                        self._settled(sent)
                finally:
                    self._source.unpin_internal(group)
            again += [lease.objects[0].key for lease in leases]
        finally:
            self._source.unpin_internal(leases)
            with self._changed:
                for key in reversed(again):
                    self._queue[key] = None
                    self._queue.move_to_end(key, last=False)
                self._busy = 0
                self._changed.notify_all()

    def _settled(self, keys: Sequence[PackedKey]) -> None:
        """Told while they are pinned: what may be evicted and counts as unwritten is sent again, or counted as lost."""
        with self._changed:
            self._policy.written(keys)

    def _after_failure(self, keys: list[PackedKey]) -> list[PackedKey]:
        """What to try again. Smaller batches fit a slow tier's deadline; one object that never fits is given up, since
        it would keep all others waiting and the circuit open for reads."""
        self._at_once = max(self._at_once // 2, 1)
        if len(keys) > 1:
            return keys
        self._attempts += 1
        if self._attempts < MAX_ATTEMPTS:
            return keys
        self._attempts = 0
        self.store.count(write_given_up=1)
        return []

    def _put(self, keys: Sequence[PackedKey], values: Sequence[memoryview]) -> None:
        try:
            now = time.monotonic()
            for namespace in _namespaces(keys):
                record = self._records.encoded(namespace)
                due = now - self._record_put.get(namespace, -RECORD_EVERY_S) >= RECORD_EVERY_S
                if record and due and self.store.put([record[0]], [record[1]])[0]:
                    self._record_put[namespace] = now
            self.store.put(keys, values)
        finally:
            for value in values:
                value.release()

    def _collect_touches(self) -> None:
        """What is to be kept from being forgotten by the tier: the objects that are used and their namespaces'
        records."""
        with self._changed:
            touches, self._touches = self._touches, {}
        self._touching = [*map(record_key, _namespaces(touches)), *touches]

    def _send_touches(self) -> None:
        """One batch, so that no more than that comes between two writes."""
        batch, self._touching = self._touching[:TOUCH_AT_ONCE], self._touching[TOUCH_AT_ONCE:]
        try:
            self.store.touch(batch)
        except TierError:
            self._touching = []


def _namespaces(keys: Iterable[PackedKey]) -> set[bytes]:
    return {key[:16] for key in keys}


def _take_bytes(leases: list[PinLease]) -> list[PinLease]:
    """Moves as many leases as one batch may hold bytes, at least one."""
    group = [leases.pop(0)]
    total = group[0].objects[0].length
    while leases and total + leases[0].objects[0].length <= BATCH_BYTES:
        total += leases[0].objects[0].length
        group.append(leases.pop(0))
    return group
