"""Owns the way of committed objects from L1 to one L2 tier: a bounded queue and one thread per tier.

Only what is being sent is pinned; what waits in the queue may be evicted and is then counted as lost. A full queue
drops new objects with a count, so a slow or dead tier never delays a STORE.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kvframework.api import PackedKey
from kvframework.errors import TierError
from kvframework.storage.l2 import L2Store
from kvframework.storage.leases import PinLease
from kvframework.storage.namespaces import NamespaceRecords

log = logging.getLogger(__name__)

BATCH_OBJECTS = 16
BATCH_BYTES = 64 << 20
RECORD_EVERY_S = 30.0
MAX_ATTEMPTS = 8


class PinnedSource(Protocol):
    """What write-back needs of L1."""

    def pin_present(self, keys: Sequence[PackedKey]) -> list[PinLease]: ...

    def unpin_internal(self, leases: Sequence[PinLease]) -> None: ...

    def bytes_of(self, lease: PinLease) -> memoryview: ...


class WriteBack:
    """Thread-safe; only `drain` and `join` block."""

    def __init__(self, source: PinnedSource, store: L2Store, records: NamespaceRecords) -> None:
        self._source = source
        self._store = store
        self._records = records
        self._record_put: dict[bytes, float] = {}
        self._queue: deque[PackedKey] = deque()
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

    def offer(self, keys: Sequence[PackedKey]) -> None:
        """Queues committed objects, dropping (and counting) what is beyond the bound. Never blocks."""
        with self._changed:
            room = 0 if self._closing else max(self._store.write_queue - len(self._queue), 0)
            self._queue.extend(keys[:room])
            self._changed.notify_all()
        self._store.count(write_dropped=max(len(keys) - room, 0))

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

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if self._closing:
                    return
            wait_s = self._store.wait_s()
            if wait_s > 0:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, wait_s)
                continue
            try:
                self._send_batch()
            except Exception:
                log.exception("write-back to %s failed", self._store.name)

    def _send_batch(self) -> None:
        with self._changed:
            keys = [self._queue.popleft() for _ in range(min(len(self._queue), self._at_once))]
            self._busy = len(keys)
        leases: list[PinLease] = []
        again: list[PackedKey] = []
        try:
            leases = self._source.pin_present(keys)
            self._store.count(write_lost=len(keys) - len(leases))
            while leases and not again and not self._closing:
                group = _take_bytes(leases)
                sent = [lease.objects[0].key for lease in group]
                try:
                    self._put(sent, [self._source.bytes_of(lease) for lease in group])
                    self._at_once, self._attempts = min(self._at_once * 2, BATCH_OBJECTS), 0
                except TierError:
                    again = self._after_failure(sent)
                finally:
                    self._source.unpin_internal(group)
            again += [lease.objects[0].key for lease in leases]
        finally:
            self._source.unpin_internal(leases)
            with self._changed:
                self._queue.extendleft(reversed(again))
                self._busy = 0
                self._changed.notify_all()

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
        self._store.count(write_given_up=1)
        return []

    def _put(self, keys: Sequence[PackedKey], values: Sequence[memoryview]) -> None:
        try:
            now = time.monotonic()
            for namespace in {key[:16] for key in keys}:
                record = self._records.encoded(namespace)
                due = now - self._record_put.get(namespace, -RECORD_EVERY_S) >= RECORD_EVERY_S
                if record and due and self._store.put([record[0]], [record[1]]):
                    self._record_put[namespace] = now
            self._store.put(keys, values)
        finally:
            for value in values:
                value.release()


def _take_bytes(leases: list[PinLease]) -> list[PinLease]:
    """Moves as many leases as one batch may hold bytes, at least one."""
    group = [leases.pop(0)]
    total = group[0].objects[0].length
    while leases and total + leases[0].objects[0].length <= BATCH_BYTES:
        total += leases[0].objects[0].length
        group.append(leases.pop(0))
    return group
