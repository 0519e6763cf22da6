"""The kit over tiers that are wrong in one way each. Run by pytest outside of the repository; every class must fail."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence

from memory_tier import MemoryTier, Parts, Store, Value
from planted_base_cases import InPlace, Planted

from kvf_dev.testing import TierConformance
from kvframework.api.tier import Outcome, PackedKey
from kvframework.errors import TierError

WRITER = threading.Lock()


class TestRetainsABuffer(Planted):
    class Bug(MemoryTier):
        def put_one(self, key: PackedKey, parts: Sequence[memoryview]) -> Outcome:
            self.later = {**getattr(self, "later", {}), key: [part[:] for part in parts]}
            return super().put_one(key, parts)

        def get_one(self, key: PackedKey, parts: Sequence[memoryview]) -> int | Outcome:
            for each, late in getattr(self, "later", {}).items():
                super().put_one(each, late)
            self.later = {}
            return super().get_one(key, parts)


class TestReordersOutcomes(Planted):
    class Bug(MemoryTier):
        def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
            return sorted(super().contains(keys, deadline=deadline), key=lambda outcome: outcome.value)


class TestRaisesOnAMiss(Planted):
    class Bug(MemoryTier):
        def get_one(self, key: PackedKey, parts: Sequence[memoryview]) -> int | Outcome:
            if self.value(key) is None:
                raise TierError("no such key")
            return super().get_one(key, parts)


class TestLiesOnDelete(Planted):
    class Bug(MemoryTier):
        def delete_one(self, key: PackedKey) -> Outcome:
            return Outcome.MISSING if self.value(key) is None else Outcome.DELETED


class TestSaysDeletedOfAnything(Planted):
    class Bug(MemoryTier):
        def delete_one(self, key: PackedKey) -> Outcome:
            super().delete_one(key)
            return Outcome.DELETED


class TestClosesOnlyOnce(Planted):
    class Bug(MemoryTier):
        def close(self) -> None:
            if self.closed:
                raise TierError("closed already")
            super().close()


class TestDropsEmptyValues(Planted):
    class Bug(MemoryTier):
        def value(self, key: PackedKey) -> bytes | None:
            return super().value(key) or None


class TestIgnoresTheDeadline(Planted):
    class Bug(MemoryTier):
        def check(self, deadline: float) -> None:
            super().check(time.monotonic() + 1.0)


class TestLooksAtTheDeadlineOnce(Planted):
    class Bug(MemoryTier):
        def in_time(self, keys: Sequence[PackedKey], deadline: float) -> Iterator[PackedKey]:
            self.check(deadline)
            for key in keys:
                time.sleep(0.001)
                yield key


class TestLocksWithoutATimeout(Planted):
    class Bug(MemoryTier):
        def put(self, keys: Sequence[PackedKey], parts: Parts, *, deadline: float) -> list[Outcome]:
            self.check(deadline)
            with WRITER:
                return super().put(keys, parts, deadline=deadline)


class TestSharesStateBetweenKeys(Planted):
    class Bug(MemoryTier):
        def in_time(self, keys: Sequence[PackedKey], deadline: float) -> Iterator[PackedKey]:
            return (key[:64] for key in super().in_time(keys, deadline))


class TestMixesConcurrentValues(Planted):
    Bug = InPlace


class TestPutsInTwoSteps(Planted):
    class Bug(MemoryTier):
        def put_one(self, key: PackedKey, parts: Sequence[memoryview]) -> Outcome:
            value = b"".join(parts)
            super().put_one(key, [memoryview(value)[: len(value) // 2]])
            time.sleep(0.001)
            return super().put_one(key, parts)


class TestDeletesInTwoSteps(Planted):
    class Bug(MemoryTier):
        def delete_one(self, key: PackedKey) -> Outcome:
            value = self.value(key)
            if value is not None:
                self.store.values[key] = Value(value[:10], 0.0)
                time.sleep(0.001)
            return super().delete_one(key)


class TestDeletesTwice(Planted):
    class Bug(MemoryTier):
        def delete_one(self, key: PackedKey) -> Outcome:
            found = key in self.store.values
            time.sleep(0.001)
            super().delete_one(key)
            return Outcome.DELETED if found else Outcome.MISSING


class TestCutsLongerValues(Planted):
    class Bug(MemoryTier):
        def get_one(self, key: PackedKey, parts: Sequence[memoryview]) -> int | Outcome:
            value = self.value(key)
            if value is None:
                return Outcome.MISSING
            whole = rest = value[: sum(part.nbytes for part in parts)]
            for part in parts:
                size = min(part.nbytes, len(rest))
                part[:size], rest = rest[:size], rest[size:]
            return len(whole)


class TestTellsTheLengthOfTheBuffer(Planted):
    class Bug(MemoryTier):
        def get_one(self, key: PackedKey, parts: Sequence[memoryview]) -> int | Outcome:
            outcome = super().get_one(key, parts)
            return outcome if isinstance(outcome, Outcome) else sum(part.nbytes for part in parts)


class TestTellsTheLengthThatWasStored(Planted):
    class Bug(MemoryTier):
        """What it received is less, since it lost the end."""

        def get_one(self, key: PackedKey, parts: Sequence[memoryview]) -> int | Outcome:
            value = self.value(key) or b""
            before = [bytes(part) for part in parts]
            outcome = super().get_one(key, parts)
            if len(value) > 60_000 and not isinstance(outcome, Outcome):
                parts[-1][-1:] = before[-1][-1:]
            return outcome


class TestTellsThatItFound(Planted):
    class Bug(MemoryTier):
        def get_one(self, key: PackedKey, parts: Sequence[memoryview]) -> int | Outcome:
            outcome = super().get_one(key, parts)
            return outcome if isinstance(outcome, Outcome) else Outcome.FOUND


class TestFailsShorterValues(Planted):
    class Bug(MemoryTier):
        def get_one(self, key: PackedKey, parts: Sequence[memoryview]) -> int | Outcome:
            if len(self.value(key) or b"") < sum(part.nbytes for part in parts):
                return Outcome.FAILED
            return super().get_one(key, parts)


class TestReadsOnlyTheFirstPart(Planted):
    class Bug(MemoryTier):
        def put_one(self, key: PackedKey, parts: Sequence[memoryview]) -> Outcome:
            return super().put_one(key, parts[:1])


class TestOneLongerValueSpoilsTheBatch(Planted):
    class Bug(MemoryTier):
        def get_into(self, keys: Sequence[PackedKey], parts: Parts, *, deadline: float) -> list[int | Outcome]:
            outcomes = super().get_into(keys, parts, deadline=deadline)
            bad = outcomes.index(Outcome.DAMAGED) if Outcome.DAMAGED in outcomes else len(outcomes)
            return outcomes[: bad + 1] + [Outcome.FAILED] * (len(outcomes) - bad - 1)


class TestTheFirstOfTwoWins(Planted):
    class Bug(MemoryTier):
        def put(self, keys: Sequence[PackedKey], parts: Parts, *, deadline: float) -> list[Outcome]:
            last_first = dict(zip(reversed(keys), reversed(parts), strict=True))
            super().put(list(last_first), list(last_first.values()), deadline=deadline)
            return [Outcome.STORED] * len(keys)


class TestLeaksAFile(Planted):
    class Bug(MemoryTier):
        def __init__(self, store: Store, **settings: float) -> None:
            super().__init__(store, **settings)  # type: ignore[arg-type]
            os.open("/dev/null", os.O_RDONLY)


class TestLeaksAThread(Planted):
    class Bug(MemoryTier):
        def __init__(self, store: Store, **settings: float) -> None:
            super().__init__(store, **settings)  # type: ignore[arg-type]
            threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()


class TestLeaksAFileWithoutReopen(Planted):
    reopen = TierConformance.reopen

    class Bug(MemoryTier):
        def put_one(self, key: PackedKey, parts: Sequence[memoryview]) -> Outcome:
            os.open("/dev/null", os.O_RDONLY)
            return super().put_one(key, parts)


class TestKeepsMemory(Planted):
    class Bug(MemoryTier):
        def get_one(self, key: PackedKey, parts: Sequence[memoryview]) -> int | Outcome:
            self.last = parts
            return super().get_one(key, parts)


class TestKeepsMemoryOfFailedCalls(Planted):
    class Bug(MemoryTier):
        def put(self, keys: Sequence[PackedKey], parts: Parts, *, deadline: float) -> list[Outcome]:
            self.under_way = parts
            outcomes = super().put(keys, parts, deadline=deadline)
            self.under_way = ()
            return outcomes


class TestTouchMakesValues(Planted):
    class Bug(MemoryTier):
        def touch_one(self, key: PackedKey) -> None:
            self.store.values[key] = Value(self.value(key) or b"", time.time())


class TestAskingForgets(Planted):
    class Bug(MemoryTier):
        def contains_one(self, key: PackedKey) -> Outcome:
            return Outcome.MISSING if self.store.values.pop(key, None) is None else Outcome.FOUND


class TestAskingMakesValues(Planted):
    class Bug(MemoryTier):
        def contains_one(self, key: PackedKey) -> Outcome:
            outcome = super().contains_one(key)
            self.store.values.setdefault(key, Value(b"", 0.0))
            return outcome


class TestAnswersWhenClosed(Planted):
    class Bug(MemoryTier):
        def close(self) -> None:
            pass


class TestRaisesAnotherError(Planted):
    class Bug(MemoryTier):
        def check(self, deadline: float) -> None:
            try:
                super().check(deadline)
            except TierError as error:
                raise ConnectionError("no connection") from error


class TestGoesOnWhenClosed(Planted):
    class Bug(MemoryTier):
        def in_time(self, keys: Sequence[PackedKey], deadline: float) -> Iterator[PackedKey]:
            for key in keys:
                while self.closed and time.monotonic() < deadline - 0.5:
                    time.sleep(0.01)
                self.check(deadline)
                yield key


class TestForgetsWhenClosed(Planted):
    class Bug(MemoryTier):
        def close(self) -> None:
            self.store.values.clear()
            super().close()


# Under faults


class TestKeepsWhatWasSpoilt(Planted):
    class Bug(MemoryTier):
        def delete_one(self, key: PackedKey) -> Outcome:
            return Outcome.DELETED


class TestNeverReplaces(Planted):
    class Bug(MemoryTier):
        def put_one(self, key: PackedKey, parts: Sequence[memoryview]) -> Outcome:
            return Outcome.STORED if self.value(key) is not None else super().put_one(key, parts)

        def delete_one(self, key: PackedKey) -> Outcome:
            return Outcome.DELETED
