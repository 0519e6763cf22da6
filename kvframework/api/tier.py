"""Owns the storage contracts: `L1Memory` (the shared arena) and `Tier` (an L2 key-value store)."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvframework.api.keys import PackedKey
from kvframework.errors import TierError


class L1Memory(ABC):
    """One shared segment. Objects are (offset, length) in it; the core allocates, the plugin provides the memory.

    Created once by the server. `fd` is passed to local clients, which map it; it stays owned by this object.
    """

    fd: int
    capacity: int

    @abstractmethod
    def start(self, on_ready: Callable[[int], None]) -> None:
        """Starts to make the memory usable, in the background.

        Calls `on_ready(n)` with a growing n whenever bytes `[0, n)` are resident; only those are handed out. Does not
        block. `on_ready` is called from the plugin's own thread and returns quickly.
        """

    @abstractmethod
    def view(self) -> memoryview:
        """A writable view of all bytes, valid until `close`."""

    @abstractmethod
    def close(self) -> None:
        """Ends the background work and frees the memory. Views must have been released. Idempotent."""

    def leave(self) -> None:
        """Called instead of `close` where the process ends right afterwards; views may be there still. Only what would
        outlive the process has to be released: the kernel frees its memory. By default `close`."""
        self.close()


class Outcome(enum.Enum):
    """What became of one key of a batch. Missing, failed and damaged are different answers.

    FAILED says nothing about what the store holds: it could not be read or written now. DAMAGED says that what lies
    under the key cannot be the value that was asked for (too long, of another type, torn): the caller deletes it.
    """

    FOUND = "found"
    MISSING = "missing"
    STORED = "stored"
    DELETED = "deleted"
    FAILED = "failed"
    DAMAGED = "damaged"


# What a tier's provider may declare. Each switches on tests of `kvframework.testing.TierConformance`.
TIER_CAPABILITIES = {
    "shared": "several nodes may use one store at the same time and see each other's values",
    "ttl": "values expire some time after they were last stored or touched",
    "capacity": "`usage` tells how many bytes are used and how many may be",
    "scan": "`scan` lists every value",
}


@dataclass(frozen=True)
class TierUsage:
    """Bytes of values in the store, and how many there may be."""

    used_bytes: int
    capacity_bytes: int


@dataclass(frozen=True)
class TierEntry:
    """One value that `scan` found. `used_at` is when it was last stored or touched, in Unix seconds."""

    key: PackedKey
    nbytes: int
    used_at: float


class Tier(ABC):
    """An L2 key-value store of opaque values.

    All calls block, take an absolute `deadline` on `time.monotonic()` and return one outcome per key, in order. They
    come from several threads at once: those of the tier's loads and of its writes, as many as `TierProvider` or the
    `[[l2]]` table says, and those that clear. FAILED is for one key; a whole operation that could not
    be done (no connection, protocol surprise, deadline) raises `TierError`. Buffers stay the caller's: a tier
    keeps no reference after it returned. A deadline that has passed and a closed tier are `TierError` at every call. A
    key that stands twice in a batch is done twice, in order. `kvframework.testing.TierConformance` holds a tier to all
    of this.
    """

    name: str

    @abstractmethod
    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        """FOUND, MISSING, FAILED or, where that shows without reading it, DAMAGED for each key."""

    @abstractmethod
    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        """Reads each value into its writable `parts`, one after the other: the bytes that were received, or MISSING,
        FAILED or DAMAGED.

        A value shorter than its parts fills their beginning; a longer one is DAMAGED, stays, and disturbs no other key
        of the batch. The rest of the parts, and the parts of keys that were not found, may hold anything afterwards.

        The number is what came from the store now, never what should have come: the parts may hold an older value's
        bytes, so the core takes a value for whole only if this number is the one that its header tells.
        """

    @abstractmethod
    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        """Stores the concatenated parts under each key, replacing what was there: STORED or FAILED.

        A value is visible whole or not at all, also to other processes and after a crash.
        """

    @abstractmethod
    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        """DELETED, MISSING or FAILED for each key."""

    def touch(self, keys: Sequence[PackedKey], *, deadline: float) -> None:
        """Tells that the keys were used (for LRU or TTL). Keys that are not there are passed over. Optional."""
        return

    def usage(self, *, deadline: float) -> TierUsage:
        """How full the store is; called before each put, so it is quick. For tiers that declare `capacity`.

        The core deletes what was used longest ago before the capacity is reached, if the tier also declares `scan`. A
        value that does not fit any more is FAILED.
        """
        raise TierError("the tier knows no capacity", where=self.name)

    def scan(self, *, deadline: float) -> Iterator[TierEntry]:
        """Every value, once, in any order; values stored or deleted meanwhile may be in it or not. For tiers that
        declare `scan`."""
        raise TierError("the tier cannot list its values", where=self.name)

    def ping(self, *, deadline: float) -> None:
        """Raises `TierError` if the store cannot be used now. By default asks for a key that does not exist."""
        self.contains([b"\0" * 72], deadline=deadline)

    @abstractmethod
    def close(self) -> None:
        """Closes connections and files. Idempotent; calls in flight fail with `TierError`."""
