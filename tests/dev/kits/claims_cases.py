"""The kit over tiers whose optional methods, or promises, do not hold. Run by pytest outside of the repository;
every class must fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from memory_tier import MemoryTier, Store, Value
from planted_base_cases import InPlace, Planted

from kvf_dev.testing import TierConformance
from kvframework.api.tier import Outcome, PackedKey, Tier, TierEntry, TierUsage


class TestClaimsTheUnknown(Planted):
    class Bug(MemoryTier):
        def capabilities(self) -> frozenset[str]:
            return frozenset({"scan", "speed"})


class Unshared(MemoryTier):
    def __init__(self, _store: Store, **settings: float) -> None:
        super().__init__(Store(), **settings)  # type: ignore[arg-type]


class TestClaimsSharing(Planted):
    shared = True
    Bug = Unshared


class TestClaimsSharingWithoutProof(Planted):
    shared = True
    Bug = MemoryTier
    reopen = TierConformance.reopen


class TestRemembersWhatTheOtherDeleted(Planted):
    shared = True

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
    shared = True
    Bug = InPlace


class TestClaimsTtl(Planted):
    class Bug(MemoryTier):
        def __init__(self, store: Store, *, ttl_s: float = 0.0, capacity: int = 1 << 30) -> None:
            super().__init__(store, capacity=capacity)


class TestTouchDoesNotProlong(Planted):
    class Bug(MemoryTier):
        def touch_one(self, key: PackedKey) -> None:
            pass


class TestStoringDoesNotProlong(Planted):
    class Bug(MemoryTier):
        def put_one(self, key: PackedKey, parts: Sequence[memoryview]) -> Outcome:
            old = self.store.values.get(key)
            outcome = super().put_one(key, parts)
            if old is not None:
                self.store.values[key] = Value(self.store.values[key].data, old.used_at)
            return outcome


class TestClaimsUsage(Planted):
    class Bug(MemoryTier):
        def usage(self, *, deadline: float) -> TierUsage:
            return Tier.usage(self, deadline=deadline)


class TestCountsNothing(Planted):
    class Bug(MemoryTier):
        def usage(self, *, deadline: float) -> TierUsage:
            return TierUsage(0, self.capacity)


class TestCountsTheDeleted(Planted):
    class Bug(MemoryTier):
        most = 0

        def usage(self, *, deadline: float) -> TierUsage:
            self.most = max(self.most, self.used())
            return TierUsage(self.most, self.capacity)


class TestSaysStoredWhenFull(Planted):
    class Bug(MemoryTier):
        def put_one(self, key: PackedKey, parts: Sequence[memoryview]) -> Outcome:
            super().put_one(key, parts)
            return Outcome.STORED


class TestKnowsNoLimit(Planted):
    class Bug(MemoryTier):
        def put_one(self, key: PackedKey, parts: Sequence[memoryview]) -> Outcome:
            self.store.values[key] = Value(b"".join(parts), 0.0)
            return Outcome.STORED


class TestCannotReplaceWhenFull(Planted):
    class Bug(MemoryTier):
        def put_one(self, key: PackedKey, parts: Sequence[memoryview]) -> Outcome:
            if self.used() + sum(part.nbytes for part in parts) > self.capacity:
                return Outcome.FAILED
            return super().put_one(key, parts)


class TestLeaksWhatAShorterValueReplaces(Planted):
    class Bug(MemoryTier):
        leaked = 0

        def put_one(self, key: PackedKey, parts: Sequence[memoryview]) -> Outcome:
            longer = len(self.value(key) or b"") - sum(part.nbytes for part in parts)
            self.leaked += max(longer, 0)
            return super().put_one(key, parts)

        def used(self) -> int:
            return super().used() + self.leaked


class TestLeaksAPieceOfTheDeletedUncounted(Planted):
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
    class Bug(MemoryTier):
        def scan(self, *, deadline: float) -> Iterator[TierEntry]:
            return Tier.scan(self, deadline=deadline)


class TestListsNothing(Planted):
    class Bug(MemoryTier):
        def scan(self, *, deadline: float) -> Iterator[TierEntry]:
            return iter(())


class TestListsOnePage(Planted):
    class Bug(MemoryTier):
        def scan(self, *, deadline: float) -> Iterator[TierEntry]:
            return islice(super().scan(deadline=deadline), 1000)


class TestListsTheDeleted(Planted):
    class Bug(MemoryTier):
        def scan(self, *, deadline: float) -> Iterator[TierEntry]:
            self.listed = {**getattr(self, "listed", {}), **{e.key: e for e in super().scan(deadline=deadline)}}
            return iter(list(self.listed.values()))


class TestListsOtherSizes(Planted):
    class Bug(MemoryTier):
        def scan(self, *, deadline: float) -> Iterator[TierEntry]:
            return (TierEntry(e.key, e.nbytes + 80, e.used_at) for e in super().scan(deadline=deadline))


class TestTouchingIsNoUse(Planted):
    class Bug(MemoryTier):
        def touch_one(self, key: PackedKey) -> None:
            pass


class TestListsWhatMoves(Planted):
    class Bug(MemoryTier):
        def scan(self, *, deadline: float) -> Iterator[TierEntry]:
            self.check(deadline)
            return (TierEntry(key, len(value.data), value.used_at) for key, value in self.store.values.items())
