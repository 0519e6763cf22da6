"""A correct tier with every optional method, in memory: what the conformance kit must pass. A plugin, `tier.memory`.

Runs where there is no `tests` package: it is copied beside the kit's test files.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

from kvframework.api.plugin import ByteSize, Options
from kvframework.api.tier import Outcome, PackedKey, TableContext, Tier, TierEntry, TierProvider, TierUsage, hookimpl
from kvframework.errors import TierError

Parts = Sequence[Sequence[memoryview]]


class Value(NamedTuple):
    data: bytes
    used_at: float


class Store:
    """What outlives the tiers on it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: dict[PackedKey, Value] = {}


STORES: dict[str, Store] = {}


class MemoryTier(Tier):
    name = "memory"

    def __init__(self, store: Store, *, ttl_s: float = 0.0, capacity: int = 1 << 30) -> None:
        self.store = store
        self.ttl_s = ttl_s
        self.capacity = capacity
        self.closed = False

    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        return [self.contains_one(key) for key in self.in_time(keys, deadline)]

    def get_into(self, keys: Sequence[PackedKey], parts: Parts, *, deadline: float) -> list[int | Outcome]:
        return [self.get_one(key, each) for key, each in zip(self.in_time(keys, deadline), parts, strict=True)]

    def put(self, keys: Sequence[PackedKey], parts: Parts, *, deadline: float) -> list[Outcome]:
        return [self.put_one(key, each) for key, each in zip(self.in_time(keys, deadline), parts, strict=True)]

    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        return [self.delete_one(key) for key in self.in_time(keys, deadline)]

    def touch(self, keys: Sequence[PackedKey], *, deadline: float) -> None:
        for key in self.in_time(keys, deadline):
            self.touch_one(key)

    def usage(self, *, deadline: float) -> TierUsage:
        self.check(deadline)
        return TierUsage(self.used(), self.capacity)

    def scan(self, *, deadline: float) -> Iterator[TierEntry]:
        self.check(deadline)
        with self.store.lock:
            values = list(self.store.values.items())
        for key, value in values:
            self.check(deadline)
            if self.value(key) is not None:
                yield TierEntry(key, len(value.data), value.used_at)

    def close(self) -> None:
        self.closed = True

    def contains_one(self, key: PackedKey) -> Outcome:
        return Outcome.MISSING if self.value(key) is None else Outcome.FOUND

    def get_one(self, key: PackedKey, parts: Sequence[memoryview]) -> int | Outcome:
        value = self.value(key)
        if value is None:
            return Outcome.MISSING
        rest = memoryview(value)
        if rest.nbytes > sum(part.nbytes for part in parts):
            return Outcome.DAMAGED
        for part in parts:
            size = min(part.nbytes, rest.nbytes)
            part[:size], rest = rest[:size], rest[size:]
        return len(value)

    def put_one(self, key: PackedKey, parts: Sequence[memoryview]) -> Outcome:
        value = b"".join(parts)
        with self.store.lock:
            old = self.store.values.get(key, Value(b"", 0.0))
            if self.used() - len(old.data) + len(value) > self.capacity:
                return Outcome.FAILED
            self.store.values[key] = Value(value, time.time())
        return Outcome.STORED

    def damage(self, key: PackedKey) -> None:
        """As a file that lost its end."""
        self.store.values[key] = Value(b"spoilt", 0.0)

    def delete_one(self, key: PackedKey) -> Outcome:
        with self.store.lock:
            there = self.value(key) is not None
            self.store.values.pop(key, None)
        return Outcome.DELETED if there else Outcome.MISSING

    def touch_one(self, key: PackedKey) -> None:
        with self.store.lock:
            value = self.value(key)
            if value is not None:
                self.store.values[key] = Value(value, time.time())

    def value(self, key: PackedKey) -> bytes | None:
        """What is there and has not expired."""
        value = self.store.values.get(key)
        if value is None:
            return None
        return None if self.expired(value) else value.data

    def expired(self, value: Value) -> bool:
        return bool(self.ttl_s) and time.time() > value.used_at + self.ttl_s

    def used(self) -> int:
        return sum(len(value.data) for value in list(self.store.values.values()) if not self.expired(value))

    def in_time(self, keys: Sequence[PackedKey], deadline: float) -> Iterator[PackedKey]:
        """`keys`, one after the other, while there is time; also asked when there is none."""
        self.check(deadline)
        for key in keys:
            self.check(deadline)
            yield key

    def check(self, deadline: float) -> None:
        if self.closed:
            raise TierError("the tier is closed", where=self.name)
        if time.monotonic() >= deadline:
            raise TierError("the call's deadline has passed", where=self.name)


class MemoryOptions(Options, frozen=True):
    store: str
    ttl_s: float = 0.0
    capacity: ByteSize = ByteSize(1 << 30)
    why_not: str = ""


def create(options: MemoryOptions, context: TableContext) -> MemoryTier:
    assert context.where
    return MemoryTier(STORES.setdefault(options.store, Store()), ttl_s=options.ttl_s, capacity=options.capacity)


class AloneTier(MemoryTier):
    """Refuses a second opener of its store, as an embedded database does."""

    name = "alone"
    open_stores: ClassVar[set[int]] = set()

    def __init__(self, store: Store, *, capacity: int) -> None:
        if id(store) in self.open_stores:
            raise TierError("the store is open already", where=self.name)
        self.open_stores.add(id(store))
        super().__init__(store, capacity=capacity)

    def close(self) -> None:
        super().close()
        self.open_stores.discard(id(self.store))


def create_alone(options: MemoryOptions, context: TableContext) -> MemoryTier:
    return AloneTier(STORES.setdefault(options.store, Store()), capacity=options.capacity)


@hookimpl
def kvf_tiers() -> list[TierProvider[MemoryOptions]]:
    return [
        TierProvider(name="memory", summary="a dict", options=MemoryOptions, shared=True, create=create),
        TierProvider(name="alone", summary="one opener a store", options=MemoryOptions, create=create_alone),
        TierProvider(
            name="elsewhere",
            summary="never here",
            options=MemoryOptions,
            create=create,
            probe=lambda: "this machine has no such store",
        ),
    ]
