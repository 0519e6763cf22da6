"""S3-FIFO as it was published: its rules one by one, and their purpose."""

from __future__ import annotations

import random
from collections import deque
from itertools import islice

import pytest
from kvf_s3fifo import S3Fifo, S3FifoOptions

from kvf_eviction import Lru
from kvframework.api.eviction import EvictionPolicy


class Cache:
    """A cache of `room` bytes; asks the policy as a server does."""

    def __init__(self, policy: EvictionPolicy, room: int) -> None:
        self.policy, self.room, self.sizes = policy, room, dict[bytes, int]()

    def ask_for(self, name: str, nbytes: int = 1) -> bool:
        """True for a hit, which LOOKUP and RETRIEVE then count as uses. A missing object is stored."""
        key = name.encode()
        if key in self.sizes:
            self.policy.on_access(key)
            self.policy.on_access(key)
            return True
        chosen, excess = list[bytes](), sum(self.sizes.values()) + nbytes - self.room
        for victim in self.policy.victims() if excess > 0 else ():
            chosen.append(victim)
            excess -= self.sizes[victim]
            if excess <= 0:
                break
        for victim in chosen:
            self.drop(victim)
        self.policy.on_insert(key, nbytes)
        self.sizes[key] = nbytes
        return False

    def drop(self, key: bytes) -> None:
        self.policy.on_remove(key)
        del self.sizes[key]

    def victims(self) -> str:
        return b" ".join(self.policy.victims()).decode()


class S3Cache(Cache):
    policy: S3Fifo


def cache(room: int, **options: float) -> S3Cache:
    return S3Cache(S3Fifo(S3FifoOptions(**options)), room)


def ask(cache: Cache, names: str) -> list[bool]:
    return [cache.ask_for(name) for name in names.split()]


@pytest.mark.parametrize("scan", [120, 1000])
def test_a_scan_pushes_the_hot_objects_out_of_lru_only(scan: int) -> None:
    found = {}
    for policy in (Lru(), S3Fifo(S3FifoOptions())):
        asked = Cache(policy, 100)
        hot = [f"hot {number}" for number in range(50)]
        for _ in range(3):
            for name in hot:
                asked.ask_for(name)
        for number in range(scan):
            asked.ask_for(f"once {number}")
        found[policy.name] = sum([asked.ask_for(name) for name in hot])
    assert found == {"lru": 0, "s3fifo": 50}


def test_what_is_used_once_only_leaves_first_in_first_out() -> None:
    asked = cache(4)
    ask(asked, "a b c d")
    asked.policy.on_access(b"a")
    assert asked.victims() == "a b c d", "one use is not enough"


def test_what_was_used_twice_goes_to_the_main_queue_at_its_turn() -> None:
    asked = cache(4)
    ask(asked, "a b c d a")
    assert asked.victims() == "b c d a"
    ask(asked, "e")
    assert b"a" in asked.sizes
    assert asked.victims() == "c d e a", "its uses were counted off by the move"


def test_what_is_asked_for_again_soon_after_it_left_goes_to_the_main_queue() -> None:
    asked = cache(4)
    assert ask(asked, "a b c d e a f") == [False] * 7
    assert asked.victims() == "d e f a"
    forgetful = cache(4, ghost=0)
    ask(forgetful, "a b c d e a f")
    assert forgetful.victims() == "d e a f"


def test_the_ghosts_are_as_many_as_it_says() -> None:
    asked = cache(11, ghost=0.4)
    ask(asked, " ".join(f"n{number}" for number in range(18)))
    assert list(asked.policy._ghost) == [b"n3", b"n4", b"n5", b"n6"], "of the seven that left, as to ten that stayed"
    for key in list(asked.sizes)[:8]:
        asked.drop(key)
    assert list(asked.policy._ghost) == [b"n6"], "and fewer where fewer are left"


def test_only_what_is_evicted_becomes_a_ghost() -> None:
    asked = cache(4)
    ask(asked, "a b c d")
    asked.drop(b"b")
    ask(asked, "b")
    assert asked.victims() == "a c d b", "all of them were on offer then, until something came"
    asked.drop(b"d")
    ask(asked, "e")
    asked.drop(b"c")
    assert list(asked.policy._ghost) == [b"d"], "what was on offer at last counts as evicted, until something comes"


def test_the_small_queue_has_its_share_of_the_bytes() -> None:
    asked = cache(100, small=0.3)
    for name in ("a", "b"):
        asked.ask_for(name, 30)
        asked.ask_for(name, 30)
    asked.ask_for("c", 40)
    asked.ask_for("d", 30)  # a and b are in the main queue now, and c has left
    assert set(asked.sizes) == {b"a", b"b", b"d"}
    assert asked.victims() == "d a b", "at its share"
    asked.ask_for("e", 10)
    assert asked.victims().startswith("d"), "above it"
    asked.drop(b"d")
    assert asked.victims() == "a b e", "below it the main queue has to give"


def test_each_use_in_the_main_queue_is_another_turn_three_at_most() -> None:
    asked = cache(10)
    ask(asked, "a b c")
    ask(asked, "a b c")
    ask(asked, "d")
    asked.drop(next(asked.policy.victims()))
    assert asked.victims() == "a b c"
    for _ in range(50):
        asked.policy.on_access(b"a")
    asked.policy.on_access(b"b")
    assert asked.victims() == "c b a"
    turns = 0
    while list(islice(asked.policy.victims(), 1)) != [b"a"]:
        asked.drop(next(asked.policy.victims()))
        turns += 1
    assert turns == 2


def test_who_only_looks_changes_nothing() -> None:
    """Walks without evictions, as when all victims are pinned: the next one offers the same objects, and no object has
    lost a use."""
    asked = cache(5)
    ask(asked, "a b c d e a c")
    before = asked.victims()
    for count in (1, 3, 5):
        list(islice(asked.policy.victims(), count))
    assert asked.victims() == before
    assert [asked.policy._small.entries[key].uses for key in (b"a", b"c")] == [2, 2]


class Published:
    """The algorithm as the paper writes it down, with queues that evict by themselves."""

    def __init__(self, room: int, small: float, ghost: float) -> None:
        self.room, self.small_share, self.ghost_share = room, small, ghost
        self.small, self.main, self.ghost = deque[bytes](), deque[bytes](), deque[bytes]()
        self.sizes, self.uses = dict[bytes, int](), dict[bytes, int]()
        self.evicted: list[bytes] = []

    def ask_for(self, name: str, nbytes: int) -> None:
        key = name.encode()
        if key in self.sizes:
            self.uses[key] = min(self.uses[key] + 2, 3)
            return
        full = sum(self.sizes.values())
        while sum(self.sizes.values()) + nbytes > self.room:
            self.evict(full)
        (self.main if key in self.ghost else self.small).append(key)
        if key in self.ghost:
            self.ghost.remove(key)
        self.sizes[key], self.uses[key] = nbytes, 0

    def evict(self, full: int) -> None:
        while True:
            waiting = sum(self.sizes[key] for key in self.small)
            if self.small and (waiting >= self.small_share * full or not self.main):
                key = self.small.popleft()
                if self.uses[key] < 2:
                    self.ghost.append(key)
                    break
                self.uses[key] = 0
            else:
                key = self.main.popleft()
                if not self.uses[key]:
                    break
                self.uses[key] -= 1
            self.main.append(key)
        del self.sizes[key], self.uses[key]
        while len(self.ghost) > self.ghost_share * len(self.sizes):
            self.ghost.popleft()
        self.evicted.append(key)


@pytest.mark.parametrize("seed", range(5))
def test_it_evicts_what_the_published_algorithm_evicts(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311  a fixed sequence
    small, ghost = chance.choice([(0.1, 0.9), (0.3, 2.0), (0.05, 0.0)])
    ours, published = cache(200, small=small, ghost=ghost), Published(200, small, ghost)
    sizes = [chance.randint(1, 12) for _ in range(150)]
    for _ in range(3000):
        number = int(chance.paretovariate(0.6)) % 150
        for asked in (ours, published):
            asked.ask_for(str(number), sizes[number])
        assert list(ours.sizes) == list(published.sizes)
    assert len(published.evicted) > 200
