"""The kit over tiers that claim, or do without a claim, what they should not. Run by pytest outside of the repository;
every class must fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from memory_tier import MemoryTier, Store, Value
from planted_base_cases import InPlace, Planted

from kvframework.api import Outcome, PackedKey, Tier, TierEntry, TierUsage
from kvframework.testing import TierConformance


class TestClaimsTheUnknown(Planted):
    capabilities = frozenset({"scan", "speed"})
    Bug = MemoryTier


class Unshared(MemoryTier):
    def __init__(self, _store: Store, **settings: float) -> None:
        super().__init__(Store(), **settings)  # type: ignore[arg-type]


class TestClaimsSharing(Planted):
    capabilities = frozenset({"shared"})
    Bug = Unshared


class TestClaimsSharingWithoutProof(Planted):
    capabilities = frozenset({"shared"})
    Bug = MemoryTier
    reopen = TierConformance.reopen


class TestRemembersWhatTheOtherDeleted(Planted):
    capabilities = frozenset({"shared"})

    class Bug(MemoryTier):
        def contains_one(self, key: PackedKey) -> Outcome:
            seen: set[PackedKey] = self.__dict__.setdefault("seen", set())
            if key in seen:
                return Outcome.FOUND
            outcome = super().contains_one(key)
            if outcome is Outcome.FOUND:
                seen.add(key)
            return outcome

        def put_one(self, key: PackedKey, parts: Sequence[memoryview]) -> Outcome:
            outcome = super().put_one(key, parts)
            self.contains_one(key)
            return outcome


class TestMixesValuesOfTwo(Planted):
    capabilities = frozenset({"shared"})
    Bug = InPlace


class TestClaimsTtl(Planted):
    capabilities = frozenset({"ttl"})

    class Bug(MemoryTier):
        def __init__(self, store: Store, *, ttl_s: float = 0.0, capacity: int = 1 << 30) -> None:
            super().__init__(store, capacity=capacity)


class TestTouchDoesNotProlong(Planted):
    capabilities = frozenset({"ttl"})

    class Bug(MemoryTier):
        def touch_one(self, key: PackedKey) -> None:
            pass


class TestStoringDoesNotProlong(Planted):
    capabilities = frozenset({"ttl"})

    class Bug(MemoryTier):
        def put_one(self, key: PackedKey, parts: Sequence[memoryview]) -> Outcome:
            old = self.store.values.get(key)
            outcome = super().put_one(key, parts)
            if old is not None:
                self.store.values[key] = Value(self.store.values[key].data, old.used_at)
            return outcome


class TestClaimsCapacity(Planted):
    capabilities = frozenset({"capacity"})

    class Bug(MemoryTier):
        usage = Tier.usage


class TestCountsNothing(Planted):
    capabilities = frozenset({"capacity"})

    class Bug(MemoryTier):
        def usage(self, *, deadline: float) -> TierUsage:
            return TierUsage(0, self.capacity)


class TestCountsTheDeleted(Planted):
    capabilities = frozenset({"capacity"})

    class Bug(MemoryTier):
        most = 0

        def usage(self, *, deadline: float) -> TierUsage:
            self.most = max(self.most, self.used())
            return TierUsage(self.most, self.capacity)


class TestSaysStoredWhenFull(Planted):
    capabilities = frozenset({"capacity"})

    class Bug(MemoryTier):
        def put_one(self, key: PackedKey, parts: Sequence[memoryview]) -> Outcome:
            super().put_one(key, parts)
            return Outcome.STORED


class TestKnowsNoLimit(Planted):
    capabilities = frozenset({"capacity"})

    class Bug(MemoryTier):
        def put_one(self, key: PackedKey, parts: Sequence[memoryview]) -> Outcome:
            self.store.values[key] = Value(b"".join(parts), 0.0)
            return Outcome.STORED


class TestCannotReplaceWhenFull(Planted):
    capabilities = frozenset({"capacity"})

    class Bug(MemoryTier):
        def put_one(self, key: PackedKey, parts: Sequence[memoryview]) -> Outcome:
            if self.used() + sum(part.nbytes for part in parts) > self.capacity:
                return Outcome.FAILED
            return super().put_one(key, parts)


class TestLeaksWhatAShorterValueReplaces(Planted):
    capabilities = frozenset({"capacity"})

    class Bug(MemoryTier):
        leaked = 0

        def put_one(self, key: PackedKey, parts: Sequence[memoryview]) -> Outcome:
            longer = len(self.value(key) or b"") - sum(part.nbytes for part in parts)
            self.leaked += max(longer, 0)
            return super().put_one(key, parts)

        def used(self) -> int:
            return super().used() + self.leaked


class TestLeaksAPieceOfTheDeletedUncounted(Planted):
    capabilities = frozenset({"capacity"})

    class Bug(MemoryTier):
        leaked = 0

        def put_one(self, key: PackedKey, parts: Sequence[memoryview]) -> Outcome:
            if self.used() + self.leaked + sum(part.nbytes for part in parts) > self.capacity:
                return Outcome.FAILED
            return super().put_one(key, parts)

        def delete_one(self, key: PackedKey) -> Outcome:
            self.leaked += len(self.value(key) or b"") // 2
            return super().delete_one(key)


class TestClaimsScan(Planted):
    capabilities = frozenset({"scan"})

    class Bug(MemoryTier):
        scan = Tier.scan


class TestListsNothing(Planted):
    capabilities = frozenset({"scan"})

    class Bug(MemoryTier):
        def scan(self, *, deadline: float) -> Iterator[TierEntry]:
            return iter(())


class TestListsOnePage(Planted):
    capabilities = frozenset({"scan"})

    class Bug(MemoryTier):
        def scan(self, *, deadline: float) -> Iterator[TierEntry]:
            return islice(super().scan(deadline=deadline), 1000)


class TestListsTheDeleted(Planted):
    capabilities = frozenset({"scan"})

    class Bug(MemoryTier):
        def scan(self, *, deadline: float) -> Iterator[TierEntry]:
            self.listed = {**getattr(self, "listed", {}), **{e.key: e for e in super().scan(deadline=deadline)}}
            return iter(list(self.listed.values()))


class TestListsOtherSizes(Planted):
    capabilities = frozenset({"scan"})

    class Bug(MemoryTier):
        def scan(self, *, deadline: float) -> Iterator[TierEntry]:
            return (TierEntry(e.key, e.nbytes + 80, e.used_at) for e in super().scan(deadline=deadline))


class TestTouchingIsNoUse(Planted):
    capabilities = frozenset({"scan"})

    class Bug(MemoryTier):
        def touch_one(self, key: PackedKey) -> None:
            pass


class TestListsWhatMoves(Planted):
    capabilities = frozenset({"scan"})

    class Bug(MemoryTier):
        def scan(self, *, deadline: float) -> Iterator[TierEntry]:
            self.check(deadline)
            return (TierEntry(key, len(value.data), value.used_at) for key, value in self.store.values.items())


class TestScansUndeclared(Planted):
    Bug = MemoryTier


class TestMeasuresUndeclared(Planted):
    Bug = MemoryTier
