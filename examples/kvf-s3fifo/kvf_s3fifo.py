"""The eviction policy `s3fifo`: S3-FIFO of Yang et al., SOSP 2023. Pure; called in the server, under the storage lock.

New objects wait in a small queue, and most of them leave from there soon. Objects that were used while they waited, or
come again soon after they left, go to the main queue. A use reorders no queue: it is only counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Annotated

from msgspec import Meta

from kvframework.api.eviction import EvictionPolicy, EvictionProvider, PackedKey, Why, hookimpl
from kvframework.api.plugin import Options

# As published: two bits for the uses of an object, and two uses in the small queue to get into the main one.
MOST_USES = 3
ENOUGH_USES = 2


class S3FifoOptions(Options, frozen=True):
    """Options of the policy; both defaults are as published."""

    small: Annotated[
        float, Meta(gt=0, lt=1, description="most bytes of objects used once, as a part of all bytes in L1")
    ] = 0.1
    ghost: Annotated[float, Meta(ge=0, le=10, description="keys remembered of evicted objects, per object in L1")] = 0.9


class Entry:
    """An object in a queue."""

    __slots__ = ("nbytes", "uses")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.uses = 0


class Queue:
    """A FIFO queue, with the bytes of all its objects. A dict keeps its order, and allows removal in the middle."""

    def __init__(self) -> None:
        self.entries: dict[PackedKey, Entry] = {}
        self.nbytes = 0

    def push(self, key: PackedKey, entry: Entry) -> None:
        self.entries[key] = entry
        self.nbytes += entry.nbytes

    def pop(self, key: PackedKey) -> Entry:
        entry = self.entries.pop(key)
        self.nbytes -= entry.nbytes
        return entry


class Walk:
    """The objects that one `victims()` has offered so far, and those it spared before. The queues change only as far as
    the core follows it: the core may look and evict nothing, since all objects are pinned."""

    def __init__(self) -> None:
        self.spared: list[PackedKey] = []
        # By offered key: the number of objects spared before it. `shown`: how many of those have been moved in the
        # queues.
        self.offered: dict[PackedKey, int] = {}
        self.shown = 0


class S3Fifo(EvictionPolicy):
    """The policy, see the module. A policy does not know the size of L1: shares are of its objects' bytes, the same
    once L1 is full.

    Every call is O(1), except that `victims` walks past an object once for each of its uses.
    """

    name = "s3fifo"

    def __init__(self, options: S3FifoOptions) -> None:
        self._options = options
        self._small, self._main = Queue(), Queue()
        self._ghost: dict[PackedKey, None] = {}
        self._walk = Walk()

    def on_insert(self, key: PackedKey, nbytes: int) -> None:
        self._walk = Walk()  # an older walk does not know this key
        queue = self._main if key in self._ghost else self._small
        self._ghost.pop(key, None)
        queue.push(key, Entry(nbytes))

    def on_access(self, key: PackedKey) -> None:
        self.on_access_many([key])

    def on_access_many(self, keys: Sequence[PackedKey]) -> None:
        small, main = self._small.entries, self._main.entries
        for key in keys:
            entry = small.get(key) or main[key]
            if entry.uses < MOST_USES:
                entry.uses += 1

    def on_remove(self, key: PackedKey) -> None:
        self.on_removes([key], "evicted")

    def on_removes(self, keys: Sequence[PackedKey], why: Why) -> None:
        for key in keys:
            evicted = self._follow(key)
            queue = self._queue_of(key)
            queue.pop(key)
            if evicted and queue is self._small:
                self._ghost[key] = None
        most = self._options.ghost * (len(self._small.entries) + len(self._main.entries))
        while len(self._ghost) > most:
            del self._ghost[next(iter(self._ghost))]

    def victims(self) -> Iterator[PackedKey]:
        """Offers the small queue's oldest while that queue has more than its share, else the main queue's. Objects that
        were used are spared, and go to the end of the main queue, with fewer uses."""
        walk = self._walk = Walk()
        again: deque[tuple[PackedKey, int]] = deque()  # the future end of the main queue
        small, main = iter(self._small.entries.items()), self._main_queue_and(again)
        waiting, staying = len(self._small.entries), len(self._main.entries)
        excess = self._small.nbytes - self._options.small * (self._small.nbytes + self._main.nbytes)
        while waiting or staying:
            if waiting and (excess >= 0 or not staying):
                key, entry = next(small)
                waiting -= 1
                excess -= entry.nbytes
                spared, uses = entry.uses >= ENOUGH_USES, 0
                staying += spared
            else:
                key, uses = next(main)
                spared, uses = uses > 0, uses - 1
                staying -= not spared
            if spared:
                again.append((key, uses))
                walk.spared.append(key)
            else:
                walk.offered[key] = len(walk.spared)
                yield key

    def _main_queue_and(self, again: deque[tuple[PackedKey, int]]) -> Iterator[tuple[PackedKey, int]]:
        for key, entry in self._main.entries.items():
            yield key, entry.uses
        while True:
            yield again.popleft()

    def _follow(self, key: PackedKey) -> bool:
        """True if `key` leaves because it was offered. The objects spared before it are then moved."""
        walk = self._walk
        before = walk.offered.pop(key, None)
        if before is None:
            return False
        for spared in walk.spared[walk.shown : before]:
            self._spare(spared)
        walk.shown = max(walk.shown, before)
        return True

    def _spare(self, key: PackedKey) -> None:
        if key in self._small.entries:
            entry = self._small.pop(key)
            entry.uses = 0
        elif key in self._main.entries:
            entry = self._main.pop(key)
            entry.uses -= 1
        else:
            return  # dropped meanwhile
        self._main.push(key, entry)

    def _queue_of(self, key: PackedKey) -> Queue:
        return self._small if key in self._small.entries else self._main


@hookimpl
def kvf_eviction_policies() -> list[EvictionProvider[S3FifoOptions]]:
    summary = "S3-FIFO: what is used once leaves soon, a scan pushes nothing else out"
    return [EvictionProvider(name="s3fifo", summary=summary, options=S3FifoOptions, create=S3Fifo)]
