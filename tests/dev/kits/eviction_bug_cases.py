"""The kit over eviction policies that are wrong in one way each. Run by pytest outside of the repository; every class
but the first must fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvf_dev.testing import EvictionConformance
from kvf_dev.testing.eviction.kit import MakePolicy
from kvframework.api.eviction import EvictionPolicy, PackedKey


class Right(EvictionPolicy):
    """Least recently used first."""

    name = "right"

    def __init__(self) -> None:
        self.order: dict[PackedKey, int] = {}

    def on_insert(self, key: PackedKey, nbytes: int) -> None:
        self.order[key] = nbytes

    def on_access(self, key: PackedKey) -> None:
        self.order[key] = self.order.pop(key)

    def on_remove(self, key: PackedKey) -> None:
        del self.order[key]

    def victims(self) -> Iterator[PackedKey]:
        return iter(self.order)


class TestRightPolicy(EvictionConformance):
    @pytest.fixture
    def make_policy(self) -> MakePolicy:
        return Right


class TestNoPolicy(EvictionConformance):
    pass


class Planted(EvictionConformance):
    Bug: type[EvictionPolicy]

    @pytest.fixture
    def make_policy(self) -> MakePolicy:
        return self.Bug


class TestOffersWhatLeft(Planted):
    class Bug(Right):
        def __init__(self) -> None:
            super().__init__()
            self.last: PackedKey | None = None

        def on_remove(self, key: PackedKey) -> None:
            super().on_remove(key)
            self.last = key

        def victims(self) -> Iterator[PackedKey]:
            yield from self.order
            if self.last is not None and self.last not in self.order:
                yield self.last


class TestOffersTheUsedTwice(Planted):
    class Bug(Right):
        def __init__(self) -> None:
            super().__init__()
            self.queue: list[PackedKey] = []

        def on_insert(self, key: PackedKey, nbytes: int) -> None:
            super().on_insert(key, nbytes)
            self.queue.append(key)

        def on_access(self, key: PackedKey) -> None:
            self.queue.append(key)

        def victims(self) -> Iterator[PackedKey]:
            return (key for key in self.queue if key in self.order)


class TestHidesTheHot(Planted):
    """They could never leave."""

    class Bug(Right):
        def __init__(self) -> None:
            super().__init__()
            self.uses: dict[PackedKey, int] = {}

        def on_access(self, key: PackedKey) -> None:
            self.uses[key] = self.uses.get(key, 0) + 1

        def on_remove(self, key: PackedKey) -> None:
            super().on_remove(key)
            self.uses.pop(key, None)

        def victims(self) -> Iterator[PackedKey]:
            return (key for key in self.order if self.uses.get(key, 0) < 4)


class TestRemembersRemovedKeysAsIn(Planted):
    """What comes back is taken for what was there already."""

    class Bug(Right):
        def __init__(self) -> None:
            super().__init__()
            self.seen: set[PackedKey] = set()

        def on_insert(self, key: PackedKey, nbytes: int) -> None:
            if key not in self.seen:
                self.seen.add(key)
                super().on_insert(key, nbytes)

        def on_access(self, key: PackedKey) -> None:
            pass

        def on_remove(self, key: PackedKey) -> None:
            self.order.pop(key, None)


class TestGoesByIdentity(Planted):
    class Bug(Right):
        def __init__(self) -> None:
            super().__init__()
            self.known: dict[int, PackedKey] = {}

        def on_insert(self, key: PackedKey, nbytes: int) -> None:
            self.known[id(key)] = key

        def on_access(self, key: PackedKey) -> None:
            self.known[id(key)]

        def on_remove(self, key: PackedKey) -> None:
            del self.known[id(key)]

        def victims(self) -> Iterator[PackedKey]:
            return iter(self.known.values())


class TestGoesByTheDigestAlone(Planted):
    """Ranks and layer groups of one chunk are one to it."""

    class Bug(Right):
        def on_insert(self, key: PackedKey, nbytes: int) -> None:
            if not any(known[40:] == key[40:] for known in self.order):
                super().on_insert(key, nbytes)

        def on_access(self, key: PackedKey) -> None:
            pass

        def on_remove(self, key: PackedKey) -> None:
            self.order.pop(key, None)


class TestSharesItsQueue(Planted):
    class Bug(Right):
        everybodys: dict[PackedKey, int] = {}  # noqa: RUF012  the bug

        def __init__(self) -> None:
            self.order = self.everybodys


class TestOfferingIsRemoving(Planted):
    """What was offered and not evicted, since it is pinned, is lost to it."""

    class Bug(Right):
        def on_remove(self, key: PackedKey) -> None:
            self.order.pop(key, None)

        def on_access(self, key: PackedKey) -> None:
            if key in self.order:
                super().on_access(key)

        def victims(self) -> Iterator[PackedKey]:
            while self.order:
                key = next(iter(self.order))
                del self.order[key]
                yield key


class TestPutsBackWhenTheWalkEnds(Planted):
    """Right as long as somebody closes its generator."""

    class Bug(Right):
        def on_access(self, key: PackedKey) -> None:
            if key in self.order:
                super().on_access(key)

        def victims(self) -> Iterator[PackedKey]:
            taken: list[PackedKey] = []
            try:
                while self.order:
                    taken.append(next(iter(self.order)))
                    self.order.pop(taken[-1])
                    yield taken[-1]
            finally:
                self.order = {**dict.fromkeys(taken, 1), **self.order}


class TestLosesCountOfBytes(Planted):
    class Bug(Right):
        def __init__(self) -> None:
            super().__init__()
            self.nbytes = 0

        def on_insert(self, key: PackedKey, nbytes: int) -> None:
            super().on_insert(key, nbytes)
            self.nbytes = (self.nbytes + nbytes) & 0xFFFFFFFF

        def on_remove(self, key: PackedKey) -> None:
            self.nbytes -= self.order.pop(key)

        def victims(self) -> Iterator[PackedKey]:
            return iter(self.order) if self.nbytes > 0 else iter(())


class TestSearchesOnUse(Planted):
    class Bug(Right):
        def __init__(self) -> None:
            super().__init__()
            self.queue: list[PackedKey] = []

        def on_insert(self, key: PackedKey, nbytes: int) -> None:
            self.queue.append(key)

        def on_access(self, key: PackedKey) -> None:
            self.queue.remove(key)
            self.queue.append(key)

        def on_remove(self, key: PackedKey) -> None:
            self.queue.pop(self.queue.index(key))

        def victims(self) -> Iterator[PackedKey]:
            return iter(list(self.queue))


class TestSortsForEachVictim(Planted):
    class Bug(Right):
        def __init__(self) -> None:
            super().__init__()
            self.now = 0

        def on_access(self, key: PackedKey) -> None:
            self.now += 1
            self.order[key] = self.now

        def victims(self) -> Iterator[PackedKey]:
            return iter(sorted(self.order, key=self.order.__getitem__))


class TestSearchesOnRemoval(Planted):
    class Bug(Right):
        def on_remove(self, key: PackedKey) -> None:
            for known in list(self.order):
                if known == key:
                    del self.order[known]


class TestTidiesUpOnEachInsert(Planted):
    class Bug(Right):
        def on_insert(self, key: PackedKey, nbytes: int) -> None:
            self.order = {known: size for known, size in self.order.items() if known != key}
            super().on_insert(key, nbytes)


class TestNeverForgets(Planted):
    class Bug(Right):
        def __init__(self) -> None:
            super().__init__()
            self.uses: dict[PackedKey, int] = {}

        def on_access(self, key: PackedKey) -> None:
            super().on_access(key)
            self.uses[key] = self.uses.get(key, 0) + 1


class TestKnowsOneThread(Planted):
    class Bug(Right):
        def __init__(self) -> None:
            self.mine = threading.local()

        @property
        def order(self) -> dict[PackedKey, int]:  # type: ignore[override]
            return self.mine.__dict__.setdefault("order", {})
