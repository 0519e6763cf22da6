"""The one ring of records, and the readers at their places in it.

Any thread puts records in, about 0.5 us each. The server itself reads those of requests, so these are always made; the
others only where there are listeners. What all readers have taken is forgotten at once. Beyond `MOST_BYTES` the oldest
records are dropped, and a reader that has not taken them learns how many it has missed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from kvframework.api.keys import CacheKey, ChunkContent, PackedKey
from kvframework.api.listener import Accessed, Added, Batch, Record, Records, Registered, Removed, RequestRecord

# Most bytes of records that wait for a reader, roughly.
MOST_BYTES = 64 << 20
# Of a record, what a request's has more, of a key in it, and of an extra or an image of a content.
_RECORD_BYTES, _REQUEST_BYTES, _KEY_BYTES, _PART_BYTES = 256, 768, 128, 256
# How long a reader that waits for records sleeps.
_PAUSE_S = 0.05


class RecordRing:
    """`wanted` says whether there are listeners, `wants_contents` whether one of them wants the tokens of prompts: who
    makes a record other than a request's asks that first. Without a reader nothing is kept."""

    def __init__(self, *, wanted: bool = False) -> None:
        self.wanted = wanted
        self.wants_contents = False
        self._lock = threading.Lock()
        self._held: deque[tuple[Record, int]] = deque()
        self._bytes = 0
        # How many records were dropped or taken by all before the oldest one that is held.
        self._before = 0
        self._readers: list[RingReader] = []

    @property
    def end(self) -> int:
        return self._before + len(self._held)

    def added(self, keys: Sequence[PackedKey]) -> None:
        self._put(Added(keys), _KEY_BYTES * len(keys))

    def removed(self, key: PackedKey) -> None:
        self._put(Removed((key,)), _KEY_BYTES)

    def accessed(self, tier: int, keys: Sequence[PackedKey], found: Sequence[bool] | bool) -> None:
        self._put(Accessed(tier, keys, found), _KEY_BYTES * len(keys))

    def registered(self, key: CacheKey, content: ChunkContent | None) -> None:
        nbytes = len(key.tokens) + len(key.digests)
        if content is not None:
            nbytes += _PART_BYTES * (len(content.extras) + len(content.images)) + len(content.tokens)
            nbytes += len(content.hashes) + sum(len(each.content) for each in content.extras)
        self._put(Registered(key, content), nbytes)

    def finished(self, record: RequestRecord) -> None:
        self._put(record, _REQUEST_BYTES + _PART_BYTES * len(record.tier_calls))

    def _put(self, record: Record, nbytes: int) -> None:
        """Add a record. Never blocks for more than the moment in which a reader takes its own."""
        if not self._readers:
            return
        with self._lock:
            self._held.append((record, _RECORD_BYTES + nbytes))
            self._bytes += _RECORD_BYTES + nbytes
            while self._bytes > MOST_BYTES:
                self._forget_oldest()

    def open(self) -> RingReader:
        """Return a reader of what is put from now on."""
        with self._lock:
            reader = RingReader(self, self.end)
            self._readers.append(reader)
            return reader

    def take(self, reader: RingReader) -> Batch:
        with self._lock:
            lost = self.lost(reader)
            records = [record for record, _ in islice(self._held, max(reader.at - self._before, 0), None)]
            reader.at = self.end
            self._forget_taken()
        return Batch(records, lost)

    def lost(self, reader: RingReader) -> int:
        """Return how many records were dropped that a reader has not taken."""
        return max(self._before - reader.at, 0)

    def close(self, reader: RingReader) -> None:
        """Keep nothing for a reader any more. Idempotent."""
        with self._lock:
            if reader in self._readers:
                self._readers.remove(reader)
            self._forget_taken()

    def _forget_taken(self) -> None:
        taken = min((reader.at for reader in self._readers), default=self.end)
        while self._before < taken:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        self._bytes -= self._held.popleft()[1]
        self._before += 1


# The ring of a server without listeners.
NO_RECORDS = RecordRing()


class RingReader(Records):
    """One listener's place in a ring: `at` is the number of the next record that it takes."""

    def __init__(self, ring: RecordRing, at: int) -> None:
        self.at = at
        self.handed_over = False
        self._ring = ring
        self._lost = 0
        self._end = threading.Event()

    @property
    def ended(self) -> bool:  # type: ignore[override]
        return self._end.is_set()

    @property
    def waiting(self) -> int:
        return self._ring.end - self.at

    @property
    def lost(self) -> int:
        return self._lost + self._ring.lost(self)

    def end(self, *, handed_over: bool) -> None:
        """Make the next batch the last one. From any thread."""
        self.handed_over = handed_over
        self._end.set()

    def take(self) -> Batch:
        batch = self._ring.take(self)
        self._lost += batch.lost
        return batch

    def close(self) -> None:
        """Take nothing any more. Idempotent."""
        self._ring.close(self)

    def __iter__(self) -> Iterator[Batch]:
        ended = False
        while not ended:
            ended = self._end.wait(_PAUSE_S)
            batch = self.take()
            if batch.records or batch.lost:
                yield batch
