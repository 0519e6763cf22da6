"""The `Tier` contract: an L2 key-value store of opaque values; and the `Node` that a tier can be part of."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kvframework.api.keys import PackedKey
from kvframework.api.plugin import Diagnose, O, Provider, TableContext, hookimpl
from kvframework.errors import PluginBroken, TierError

__all__ = [
    "Loan",
    "Node",
    "NodeIdentity",
    "Outcome",
    "PackedKey",
    "RegistersMemory",
    "TableContext",
    "Terms",
    "Tier",
    "TierEntry",
    "TierError",
    "TierProvider",
    "TierUsage",
    "hookimpl",
]

# Concurrent loads, or concurrent batches of writes, of one tier.
MAX_TIER_CALLS = 64
# The methods that the core calls only if the tier has them.
OPTIONAL_METHODS = ("admit", "scan", "touch", "usage")


class Outcome(enum.Enum):
    """The outcome of one key of a batch. FAILED says nothing about the store's content, which could not be read or
    written now. DAMAGED says that the content under the key cannot be the requested value (too long, of another type,
    torn): the caller deletes it."""

    FOUND = "found"
    MISSING = "missing"
    STORED = "stored"
    DELETED = "deleted"
    FAILED = "failed"
    DAMAGED = "damaged"


@dataclass(frozen=True)
class TierUsage:
    """Bytes of values in the store, and its capacity."""

    used_bytes: int
    capacity_bytes: int


@dataclass(frozen=True)
class TierEntry:
    """One value that `scan` found. `used_at` is the time of its last store or touch, in Unix seconds; None: the store
    does not record it, which a tier with `usage` must not return. Ahead of now: the value is promised until then."""

    key: PackedKey
    nbytes: int
    used_at: float | None


@dataclass(frozen=True)
class Terms:
    """What `admit` is told of one value: the name of its tenant, "" for none, the most bytes that values of the tenant
    may have in the store, and what is asked for: the `nbytes` of a value that is about to be put, or, with `nbytes` 0,
    that the store keeps a value that it has `until` then, in Unix seconds. Of promises that do not fit together those
    of a high `priority` (1 to 100) are made."""

    key: PackedKey
    tenant: str
    most: int
    nbytes: int = 0
    until: float = 0.0
    priority: int = 50


class Tier(ABC):
    """An L2 key-value store of opaque values.

    All calls block, take an absolute `deadline` on `time.monotonic()` and return one outcome per key, in order. Several
    threads call at once, see `TierProvider`. FAILED is for one key; an operation that failed as a whole (no connection,
    protocol surprise, deadline) raises `TierError`, and so does every call after `close`. The caller owns the buffers:
    a tier keeps no reference after it returned. A key that occurs twice in a batch is processed twice, in order.
    `kvf_dev.testing.TierConformance` holds a tier to all of this.

    A tier with `read_only` reads values that others write: the core never calls `put`, `delete` and `touch`, and
    announces no value to routers. Its `put` returns FAILED, its `delete` MISSING."""

    name: str
    read_only: bool = False

    @abstractmethod
    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        """Return FOUND, MISSING, FAILED or, where that shows without reading the value, DAMAGED for each key."""

    @abstractmethod
    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        """Read each value into its writable `parts`, one after the other, and return the number of bytes received, or
        MISSING, FAILED or DAMAGED. It counts bytes received now, never bytes expected: the parts may hold an older
        value's bytes, so the core takes a value for whole only if this number equals the length in its header.

        A value shorter than its parts fills their beginning; a longer one is DAMAGED, stays, and disturbs no other key
        of the batch. The rest of the parts, and the parts of keys that were not found, have any content afterwards."""

    @abstractmethod
    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        """Store the concatenated parts under each key, replacing any older value; return STORED or FAILED. A value is
        visible whole or not at all, also to other processes and after a crash."""

    @abstractmethod
    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        """Delete each key and return DELETED, MISSING or FAILED for it."""

    def admit(self, terms: Sequence[Terms], *, deadline: float) -> list[Outcome]:
        """Return STORED for each value that may be put, or that is kept now; else FAILED, or MISSING for a value to
        keep that the store lacks. Makes room by deleting the tenant's least recently used values, never a promised one.
        Optional: without it no value is promised, and no tenant has a quota here. `problems` names what the store lacks
        to keep promises: that they survive its restart, and nothing else deletes such values."""
        raise TierError("the tier knows no terms", where=self.name)

    def touch(self, keys: Sequence[PackedKey], *, deadline: float) -> None:
        """Records a use of the keys (for LRU or TTL), ignoring missing ones. Optional."""
        return

    def usage(self, *, deadline: float) -> TierUsage:
        """Return how full the store is; called before each put: quick. Optional. The core deletes the least recently
        used values before the capacity is reached, if the tier has `scan` too. A value that does not fit is FAILED."""
        raise TierError("the tier does not know its capacity", where=self.name)

    def scan(self, *, deadline: float) -> Iterator[TierEntry]:
        """Yield every value once, in any order; values stored or deleted meanwhile may be in it or not. Optional."""
        raise TierError("the tier cannot list its values", where=self.name)

    def capabilities(self) -> frozenset[str]:
        """Return which of the optional methods `admit`, `touch`, `usage` and `scan` this tier has: by default those
        that its class overrides. Asked once, after `create`; does not block."""
        return frozenset(name for name in OPTIONAL_METHODS if getattr(type(self), name) is not getattr(Tier, name))

    def attach(self, node: Node) -> None:
        """Receive the server's node, once, before the server serves. Before that the server calls only `ping` and
        `problems`; commands without a server also call `scan`, `get_into` and `delete`. Optional; must not block. A
        `KVFrameworkError` stops the start."""
        return

    def problems(self) -> Sequence[str]:
        """Return the present problems, one line each, without secrets: the place and the store's error text. Called
        every few seconds, also while calls fail, and after a `put` with a FAILED value, so that the log has its reason.
        Must not block. Optional."""
        return ()

    def status(self) -> Mapping[str, object]:
        """Return further facts for an operator, as JSON-like values without secrets, at most 64 KiB: `l2[].details` in
        the server's status. Called like `problems`. Optional. These have metrics: rows `nodes` with `node` (its name),
        `state` (`up` if it answers) and the counters `values`, `nbytes` and `failed` of what came from it; a table
        `lending` with the counters `values` and `nbytes` of what went to others, and those in `refused`; and
        `counters`, the tier's own: what `kvframework.api.counter.Counts.status` returns."""
        return {}

    def rejected(self, key: PackedKey) -> None:
        """Receive the key of an unusable value that `get_into` has just returned: torn, or of another name or format.
        Only for `read_only` tiers; in other tiers the core deletes the value. Must not block. Optional."""
        return

    def ping(self, *, deadline: float) -> None:
        """Raise `TierError` if the store cannot be used now. The default looks up a key that does not exist."""
        self.contains([b"\0" * 72], deadline=deadline)

    @abstractmethod
    def close(self) -> None:
        """Close connections and files. Idempotent; calls in flight fail with `TierError`."""


@dataclass(frozen=True, kw_only=True)
class TierProvider(Provider[O]):
    """A tier for `[[l2]]`. `shared`: several nodes may use one store at the same time and see each other's values.
    `loads` and `writes` limit the batches that are loaded and written at once, unless the tier's `[[l2]]` table has
    other numbers: 1 for a store that takes one call after the other anyway. One thread more asks `contains`.

    `diagnose` is a function (options, TableContext, deadline) -> Sequence[Finding] and makes the report of `kvframework
    doctor` on the store: reachable, large enough, set up as a cache? It runs in its own process, may block until
    `deadline` on `time.monotonic()`, and changes nothing: a server may use it. A problem is a finding or a
    `KVFrameworkError`.

    `store` names the store that the options lead to, without a secret: two tiers of one server may not have the same.
    """

    kind = "tier"
    create: Callable[[O, TableContext], Tier]
    diagnose: Diagnose[O] | None = None
    store: Callable[[O], str] | None = None
    shared: bool = False
    loads: int = 4
    writes: int = 2

    def __post_init__(self) -> None:
        for name, value in (("loads", self.loads), ("writes", self.writes)):
            if not 1 <= value <= MAX_TIER_CALLS:
                raise PluginBroken(
                    f"{name} is {value}", where=f"tier.{self.name}", available=f"1 to {MAX_TIER_CALLS} calls at once"
                )


@dataclass(frozen=True)
class NodeIdentity:
    """Who a server is. `boot_id`, 16 bytes, is new with each start. Servers with another `chunk_size` (tokens) or
    another `hasher` (its fingerprint) give other names to the same content, so they share nothing."""

    boot_id: bytes
    chunk_size: int
    hasher: str


class Loan(AbstractContextManager["Loan"], ABC):
    """One object of L1 in the form of a tier's value, of `nbytes` bytes, pinned until `close`. For one thread."""

    nbytes: int

    @abstractmethod
    def parts(self) -> Sequence[memoryview]:
        """Return the value: a header with a checksum, made now, which reads all of it, and the object's own bytes in
        the arena, which must not be written. Valid until `close`."""

    @abstractmethod
    def close(self) -> None:
        """Unpin the object. Idempotent; does not block."""

    def __exit__(self, *_exc: object) -> None:
        self.close()


class Node(ABC):
    """The node that a tier is part of, from `Tier.attach` until the tier's `close`. Thread-safe; no call waits for L2
    or for an engine. `arena_fd` is the descriptor of L1's arena, `arena_bytes` long, for libraries that register memory
    and for helper processes that map it; it stays the server's."""

    identity: NodeIdentity
    arena_fd: int
    arena_bytes: int

    @abstractmethod
    def holds(self, keys: Sequence[PackedKey]) -> Sequence[bool]:
        """Return which of `keys` `lend` would lend now. An object that is not lent may leave at any time."""

    @abstractmethod
    def lend(self, key: PackedKey) -> Loan | None:
        """Return L1's object of `key`, or the server's record of a namespace; None if there is none. Asks no tier, and
        does not count as a use of the object for eviction."""

    @abstractmethod
    def models(self) -> Mapping[str, Collection[bytes]]:
        """Return the namespaces, 16 bytes each, of every model that this server knows."""


class RegistersMemory(ABC):
    """A tier whose client library must register memory before it reads or writes there, as for RDMA: a second base
    class of a `Tier` that `HelperTier` runs. The parts of `put` and `get_into` then lie in registered memory. Each
    concurrent call has separate memory, and registers it in its own thread. An exception fails the call that needs the
    memory."""

    @abstractmethod
    def register_memory(self, memory: memoryview) -> None:
        """Register memory, which is mapped, writable and page-aligned, and stays so until `unregister_memory`."""

    @abstractmethod
    def unregister_memory(self, memory: memoryview) -> None:
        """Unregister memory of `register_memory`: no call uses it any more, and it is unmapped afterwards."""
