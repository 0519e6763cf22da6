"""Owns the storage contracts: `L1Memory` (the shared arena) and `Tier` (an L2 key-value store)."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from kvframework.api.keys import PackedKey


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


class Outcome(enum.Enum):
    """What became of one key of a batch. A missing key and a failed operation are different answers."""

    FOUND = "found"
    MISSING = "missing"
    STORED = "stored"
    DELETED = "deleted"
    FAILED = "failed"


class Tier(ABC):
    """An L2 key-value store of opaque values.

    All calls block, come from the storage threads (several at once), take an absolute `deadline` on
    `time.monotonic()` and return one outcome per key, in order. FAILED is for one key; a whole operation that could not
    be done (no connection, protocol surprise, deadline) raises `TierError`. Buffers stay the caller's: a tier
    keeps no reference after it returned.
    """

    name: str

    @abstractmethod
    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        """FOUND, MISSING or FAILED for each key."""

    @abstractmethod
    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        """Reads each value into its writable `parts`, one after the other.

        FOUND only if the value had exactly the total length of its parts; another length is FAILED. Parts of keys
        that were not found may hold anything afterwards.
        """

    @abstractmethod
    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        """Stores the concatenated parts under each key, replacing what was there: STORED or FAILED."""

    @abstractmethod
    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        """DELETED, MISSING or FAILED for each key."""

    def touch(self, keys: Sequence[PackedKey], *, deadline: float) -> None:
        """Tells that the keys were used (for LRU or TTL). Optional."""
        return

    def ping(self, *, deadline: float) -> None:
        """Raises `TierError` if the store cannot be used now. By default asks for a key that does not exist."""
        self.contains([b"\0" * 72], deadline=deadline)

    @abstractmethod
    def close(self) -> None:
        """Closes connections. Idempotent; calls in flight fail with `TierError`."""
