"""Contract of an L2 tier: a key-value store of opaque values."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvframework.api.keys import PackedKey
from kvframework.api.plugin import Diagnose, O, Provider, TableContext, hookimpl
from kvframework.errors import PluginBroken, TierError

__all__ = [
    "Outcome",
    "PackedKey",
    "TableContext",
    "Tier",
    "TierEntry",
    "TierError",
    "TierProvider",
    "TierUsage",
    "hookimpl",
]

# Loads, or batches of writes, that call one tier at once.
MAX_TIER_CALLS = 64
# The methods of a tier that the core calls only if the tier has them.
OPTIONAL_METHODS = ("scan", "touch", "usage")


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
        """Notes that the keys were used (for LRU or TTL). Keys that are not there are passed over. Optional."""
        return

    def usage(self, *, deadline: float) -> TierUsage:
        """How full the store is; called before each put, so it is quick. Optional.

        The core deletes what was used longest ago before the capacity is reached, if the tier has `scan` too. A value
        that does not fit any more is FAILED.
        """
        raise TierError("the tier knows no capacity", where=self.name)

    def scan(self, *, deadline: float) -> Iterator[TierEntry]:
        """Every value, once, in any order; values stored or deleted meanwhile may be in it or not. Optional."""
        raise TierError("the tier cannot list its values", where=self.name)

    def capabilities(self) -> frozenset[str]:
        """Which of the optional methods `touch`, `usage` and `scan` this tier has: those that its class overrides. A
        tier that passes calls on to another one returns that one's. Asked once, after `create`; does not block."""
        return frozenset(name for name in OPTIONAL_METHODS if getattr(type(self), name) is not getattr(Tier, name))

    def ping(self, *, deadline: float) -> None:
        """Raises `TierError` if the store cannot be used now. By default asks for a key that does not exist."""
        self.contains([b"\0" * 72], deadline=deadline)

    @abstractmethod
    def close(self) -> None:
        """Closes connections and files. Idempotent; calls in flight fail with `TierError`."""


@dataclass(frozen=True, kw_only=True)
class TierProvider(Provider[O]):
    """A tier for `[[l2]]`. `shared`: several nodes may use one store at the same time and see each other's values.

    `loads` and `writes` are how many loads and how many batches of writes call the tier at once, unless its
    `[[l2]]` table says another number: 1 for a store that takes one call after the other anyway. Whatever they are, a
    tier is called from several threads at once.

    `diagnose` is a function (options, TableContext, deadline) -> Sequence[Finding] and says what `kvframework doctor`
    should report of the store: is it reachable, large enough, set up as a cache? It runs in a process of its own, may
    block until `deadline` on `time.monotonic()`, and changes nothing: a server may be using the store. What is wrong is
    a finding or a `KVFrameworkError`.
    """

    kind = "tier"
    create: Callable[[O, TableContext], Tier]
    diagnose: Diagnose[O] | None = None
    shared: bool = False
    loads: int = 2
    writes: int = 1

    def __post_init__(self) -> None:
        for name, value in (("loads", self.loads), ("writes", self.writes)):
            if not 1 <= value <= MAX_TIER_CALLS:
                raise PluginBroken(
                    f"{name} is {value}", where=f"tier.{self.name}", available=f"1 to {MAX_TIER_CALLS} calls at once"
                )
