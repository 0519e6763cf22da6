"""The kit over eviction policies that are wrong in one way each, a line a bug, and over two right ones, of which one
draws lots. Run by pytest outside of the repository."""
# ruff: noqa: ARG005, E501  the arguments of all bugs are the same, and each is one line

from __future__ import annotations

import contextlib
import heapq
import random
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, cycle
from operator import itemgetter
from typing import Any

import pytest

from kvf_dev.testing import EvictionConformance
from kvf_dev.testing.eviction import MakePolicy
from kvframework.api.eviction import EvictionPolicy, PackedKey


class Right(EvictionPolicy):
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


class Planted(EvictionConformance):
    Bug: type[EvictionPolicy] = Right

    @pytest.fixture
    def make_policy(self) -> MakePolicy:
        return self.Bug


class TestRightPolicy(Planted):
    pass


class TestNoPolicy(EvictionConformance):
    pass


class SampledLfu(EvictionPolicy):
    """Correct: of some objects drawn by lot the least used leaves first. No two walks have the same order."""

    name = "sampled"

    def __init__(self) -> None:
        self.keys: list[PackedKey] = []
        self.at: dict[PackedKey, int] = {}
        self.uses: dict[PackedKey, int] = {}
        self.lots = random.Random()

    def on_insert(self, key: PackedKey, nbytes: int) -> None:
        self.at[key], self.uses[key] = len(self.keys), 0
        self.keys.append(key)

    def on_access(self, key: PackedKey) -> None:
        self.uses[key] += 1

    def on_remove(self, key: PackedKey) -> None:
        del self.uses[key]
        at, last = self.at.pop(key), self.keys.pop()
        if last != key:
            self.keys[at], self.at[last] = last, at

    def victims(self) -> Iterator[PackedKey]:
        # The lots not yet drawn are a permutation that is written down only where it is no longer the order of keys.
        moved: dict[int, int] = {}
        drawn: list[PackedKey] = []
        left = len(self.keys)
        while left or drawn:
            while left and len(drawn) < 8:
                lot, left = self.lots.randrange(left), left - 1
                drawn.append(self.keys[moved.get(lot, lot)])
                moved[lot] = moved.pop(left, left)
            victim = min(drawn, key=self.uses.__getitem__)
            drawn.remove(victim)
            yield victim


class TestSampledLfuPolicy(Planted):
    Bug = SampledLfu


def bug(
    state: Callable[[], Any] = list, base: type[EvictionPolicy] = Right, **calls: Callable[..., Any]
) -> type[EvictionPolicy]:
    """A policy whose `calls` get the correct call first; `state()` is its attribute `more`."""

    def replaced(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        right = getattr(base, name)
        return lambda self, *args: call(self, lambda *more: right(self, *more), *args)

    def init(self: Any) -> None:
        base.__init__(self)  # type: ignore[misc]
        self.more = state()

    return type("Bug", (base,), {"__init__": init, **{name: replaced(name, call) for name, call in calls.items()}})


def also(work: Callable[..., object]) -> Callable[..., Any]:
    """The correct call, and `work` behind it."""

    def call(self: Any, right: Callable[..., Any], *args: Any) -> Any:
        answer = right(*args)
        work(self, *args)
        return answer

    return call


def before(work: Callable[..., object]) -> Callable[..., Any]:
    def call(self: Any, right: Callable[..., Any], *args: Any) -> Any:
        work(self, *args)
        return right(*args)

    return call


def recursive(keys: Iterator[PackedKey]) -> Iterator[PackedKey]:
    for key in keys:
        yield key
        yield from recursive(keys)


def one_walk(self: Any, right: Callable[[], Any]) -> Iterator[PackedKey]:
    if not self.more:
        self.more.append(list(self.order))
    yield from self.more[0]
    self.more.clear()


def under(lock: Any, keys: Iterator[PackedKey]) -> Iterator[PackedKey]:
    lock.acquire()
    try:
        yield from keys
    finally:
        with contextlib.suppress(RuntimeError):  # of another thread, which ends an abandoned walk
            lock.release()


def counts(self: Any, key: PackedKey) -> None:
    self.more[0] += 1


def counted(self: Any, keys: Sequence[PackedKey]) -> None:
    for _ in keys:
        self.more[0] += 1


def skips(self: Any, right: Callable[[], Any]) -> Iterator[PackedKey]:
    """Takes what it offered last time for evicted."""
    offered, self.more = set(self.more), []
    for key in right():
        if key not in offered:
            self.more.append(key)
            yield key


def drops(self: Any, key: PackedKey) -> None:
    """The last key takes the place of the removed one, and is not told so."""
    at = self.at.pop(key)
    del self.uses[key]
    self.keys[at] = self.keys[-1]
    self.keys.pop()


def stale(self: Any, right: Callable[[], Any]) -> Iterator[PackedKey]:
    """A heap of uses, in which old ones stay until they are on top."""
    for _, key in sorted(self.more):
        if key in self.order:
            yield key


def mangled(part: Callable[[PackedKey], PackedKey]) -> type[EvictionPolicy]:
    """Knows a part of the key only."""
    calls: dict[str, Callable[..., Any]] = {
        "on_insert": lambda s, right, key, n: s.more.__setitem__(part(key), key),
        "on_access": lambda s, right, key: None,
        "on_remove": lambda s, right, key: s.more.pop(part(key), None),
        "victims": lambda s, right: iter(list(s.more.values())),
    }
    return bug(dict, **calls)


SHARED: dict[PackedKey, int] = {}


def only_known(self: Any, right: Callable[..., Any], key: PackedKey) -> None:
    if key in self.order:
        right(key)


def no_more(self: Any, right: Callable[..., Any], key: PackedKey) -> None:
    self.order.pop(key, None)


def nothing(self: Any, right: Callable[..., Any], key: PackedKey) -> None:
    pass


def taken_out(self: Any) -> Iterator[PackedKey]:
    """What was offered and not evicted, since it is pinned, is lost."""
    while self.order:
        key = next(iter(self.order))
        del self.order[key]
        yield key


def put_back(self: Any) -> Iterator[PackedKey]:
    """Right as long as somebody closes this generator."""
    taken: list[PackedKey] = []
    try:
        while self.order:
            taken.append(next(iter(self.order)))
            self.order.pop(taken[-1])
            yield taken[-1]
    finally:
        self.order = {**dict.fromkeys(taken, 1), **self.order}


class KnowsOneThread(Right):
    def __init__(self) -> None:
        self.mine = threading.local()

    @property
    def order(self) -> dict[PackedKey, int]:  # type: ignore[override]
        return self.mine.__dict__.setdefault("order", {})


EVERYBODYS: dict[PackedKey, int] = {}


# fmt: off
BUGS = {
    # all that is in, each once
    "HidesTheNewest": bug(victims=lambda s, right: iter(list(s.order)[:-1])),
    "HidesTheOldest": bug(victims=lambda s, right: iter(list(s.order)[1:] or list(s.order))),
    "HidesTheLarge": bug(victims=lambda s, right: (k for k, n in s.order.items() if n < 1 << 32)),
    "HidesTheTiny": bug(victims=lambda s, right: (k for k, n in s.order.items() if n >= 512)),
    "HidesWhatWasJustUsed": bug(on_access=also(lambda s, key: s.more.append(key)), victims=lambda s, right: (k for k in s.order if k not in s.more[-1:])),
    "HidesWhatIsYoung": bug(dict, on_insert=also(lambda s, key, n: s.more.update({key: time.time()})), victims=lambda s, right: (k for k in s.order if time.time() > s.more[k] + 0.5)),
    "HoldsAThousand": bug(lambda: deque(maxlen=1000), on_insert=also(lambda s, key, n: s.more.append(key)), victims=lambda s, right: (k for k in list(s.more) if k in s.order)),
    "OffersAThousand": bug(victims=lambda s, right: iter(list(s.order)[:1000])),
    "NeverEnds": bug(victims=lambda s, right: cycle(s.order)),
    "SkipsWhatItOfferedBefore": bug(victims=skips),
    "GoesOnWhereItStopped": bug(victims=one_walk),
    "RecursesForEach": bug(victims=lambda s, right: recursive(right())),
    "ForgetsAtTheSecondUse": bug(Counter, on_access=lambda s, right, key: (s.more.update([key]), s.order.pop(key, None) if s.more[key] > 1 else right(key))),
    "LosesTheLastOfItsList": bug(base=SampledLfu, on_remove=lambda s, right, key: drops(s, key)),
    "RemovesTheHeadWhateverLeaves": bug(on_remove=lambda s, right, key: s.order.pop(next(iter(s.order)))),
    "WantsToHaveOfferedIt": bug(set, victims=lambda s, right: (s.more.add(k) or k for k in right()), on_remove=lambda s, right, key: (s.more.remove(key), right(key))),
    "EntersGhostsTwice": bug(on_remove=also(lambda s, key: s.more.append(key)), victims=lambda s, right: iter([*right(), *(k for k in s.more if k in s.order)])),
    "KnowsTheDigestOfTheKey": mangled(lambda key: key[:64]),
    "KnowsTheEndOfTheKey": mangled(lambda key: key[8:]),
    "KnowsAShortHash": mangled(lambda key: hash(key) % 4093),  # type: ignore[arg-type, return-value]
    "SharesADefault": type("Bug", (Right,), {"__init__": lambda self, order=SHARED: setattr(self, "order", order)}),
    # the form of an answer, and errors
    "AnswersAList": bug(victims=lambda s, right: list(s.order)),
    "OffersHex": bug(victims=lambda s, right: (k.hex() for k in s.order)),
    "OffersViews": bug(victims=lambda s, right: (memoryview(k) for k in s.order)),
    "OffersPairs": bug(victims=lambda s, right: iter(s.order.items())),
    "RaisesOnAnEmptyWalk": bug(victims=lambda s, right: iter([min(s.order)] and s.order)),
    "RaisesOnAKeyThatComesAgain": bug(set, on_insert=also(lambda s, key, n: s.more.remove(key) if key in s.more else s.more.add(key))),
    "CountsUsesInAByte": bug(lambda: array("B", [0]), on_access=also(counts), on_access_many=also(counted)),
    "CountsUsesIn16Bits": bug(lambda: array("H", [0]), on_access=also(counts), on_access_many=also(counted)),
    "SizesOf32Bits": bug(lambda: array("I", [0]), on_insert=also(lambda s, key, n: s.more.__setitem__(0, n))),
    # many at once
    "ManyForgetsTheLast": bug(on_access_many=lambda s, right, keys: right(keys[:-1])),
    "ManyTakesTheFirstThousand": bug(on_access_many=lambda s, right, keys: right(keys[:1024])),
    "ManyTakesEach8191": bug(on_access_many=lambda s, right, keys: right(keys[:8191])),
    "ManyBackwards": bug(on_access_many=lambda s, right, keys: right(keys[::-1])),
    "ManyEachOnce": bug(on_access_many=lambda s, right, keys: right(sorted(set(keys), key=keys.index))),
    "ManyIsNothing": bug(on_access_many=lambda s, right, keys: None),
    "ManySortsTheCallersList": bug(on_access_many=lambda s, right, keys: (right(keys), keys.sort() if isinstance(keys, list) else None)),
    "ManyEmptiesTheCallersList": bug(on_access_many=lambda s, right, keys: [right([keys.pop(0)]) for _ in range(len(keys))] if isinstance(keys, list) else right(keys)),
    "ManyTakesListsOnly": bug(on_access_many=lambda s, right, keys: right(keys.copy())),
    # cost
    "CopiesAllForAWalk": bug(victims=lambda s, right: iter(list(s.order))),
    "SortsNumbers": bug(victims=lambda s, right: (k for k, _ in sorted(s.order.items(), key=itemgetter(1)))),
    "AddsUpAllBytes": bug(on_insert=also(lambda s, key, n: sum(s.order.values()))),
    "LooksForTheLeast": bug(on_remove=before(lambda s, key: min(s.order.values()))),
    "CopiesAtEachUse": bug(on_access=also(lambda s, key: dict(s.order))),
    "HeapifiesEachBatch": bug(on_access_many=also(lambda s, keys: heapq.heapify([(n, k) for k, n in s.order.items()]))),
    "CountsAllBehindTheFirst": bug(victims=lambda s, right: (k for k in right() if sum(s.order.values()))),
    "Sleeps": bug(on_insert=also(lambda s, key, n: time.sleep(0.002))),
    "SleepsInAWalk": bug(victims=before(lambda s: time.sleep(0.002))),
    # memory
    "KeepsEachUse": bug(on_access=also(lambda s, key: s.more.append((time.time(), key)))),
    "KeepsStaleUsesInItsHeap": bug(on_insert=also(lambda s, key, n: s.more.append((time.time(), key))), on_access=also(lambda s, key: heapq.heappush(s.more, (time.time(), key)))),
    "KeepsEachWalk": bug(victims=lambda s, right: (s.more.append(iter(s.order)), right())[1]),
    "KeepsAllGhosts": bug(dict, on_remove=also(lambda s, key: s.more.update({key: 1}))),
    "KeepsGhostsOfTheUnused": bug(dict, on_insert=also(lambda s, key, n: s.more.update({key: 0})), on_access=also(lambda s, key: s.more.pop(key, None)), on_access_many=also(lambda s, keys: [s.more.pop(k, None) for k in keys])),
    "KeepsGhostsOfTheUsed": bug(dict, on_access=also(lambda s, key: s.more.update({key: s.more.get(key, 0) + 1})), on_remove=also(lambda s, key: s.more.get(key, 0) < 2 and s.more.pop(key, None))),
    "KeepsTheSizesOfAll": bug(dict, on_insert=also(lambda s, key, n: s.more.update({key: n}))),
    # whole requests
    "InsertsForgetTheLast": bug(on_inserts=lambda s, right, keys, sizes, chunks, facts: right(keys[:-1], sizes[:-1], chunks[:-1], facts)),
    "InsertsNeedAPlace": bug(on_inserts=also(lambda s, keys, sizes, chunks, facts: -1 in chunks and 1 / 0)),
    "UsesNeedARequest": bug(dict, on_inserts=also(lambda s, keys, sizes, chunks, facts: s.more.update({facts.request_id: 1})), on_uses=also(lambda s, keys, facts: s.more[facts.request_id])),
    "KnowsTwoUses": bug(on_inserts=also(lambda s, keys, sizes, chunks, facts: {"store": 1, "load": 1}[facts.use])),
    "RemovesWhatIsEvictedOnly": bug(on_removes=lambda s, right, keys, why: [s.on_remove(k) for k in keys if why == "evicted"]),
    "RemovesTheCallersKeys": bug(on_removes=lambda s, right, keys, why: [s.on_remove(keys.pop()) for _ in range(len(keys))]),  # type: ignore[attr-defined]
    "AdmitsAndTakesIn": bug(admits=also(lambda s, keys, sizes, chunks, facts: s.order.update(zip(keys, sizes, strict=True)))),
    "AdmitsYesOrNo": bug(admits=lambda s, right, keys, sizes, chunks, facts: True),
    "AdmitsTheKeys": bug(admits=lambda s, right, keys, sizes, chunks, facts: keys),
    "AdmitsOneMore": bug(admits=lambda s, right, keys, sizes, chunks, facts: len(keys) + 1),
    "KeepsEachRequest": bug(on_uses=also(lambda s, keys, facts: s.more.append(facts))),
    # hints: `more` has what was said of keys
    "HidesWhatIsKept": bug(dict, on_inserts=also(lambda s, keys, sizes, chunks, facts: s.more.update(dict.fromkeys(keys, facts.hint))), victims=lambda s, right: (k for k in right() if s.more.get(k) != "keep")),
    "OffersWhatIsDoneTwice": bug(dict, on_uses=also(lambda s, keys, facts: s.more.update(dict.fromkeys(keys, facts.hint))), on_remove=also(lambda s, key: s.more.pop(key, None)), victims=lambda s, right: chain((k for k, hint in s.more.items() if hint == "done"), right())),
    "LosesWhatIsDone": bug(dict, on_uses=also(lambda s, keys, facts: facts.hint == "done" and [s.order.pop(k, None) for k in keys])),
    "KnowsTwoHints": bug(on_inserts=also(lambda s, keys, sizes, chunks, facts: {"": 0, "done": 1}[facts.hint])),
    "KeepsAllItIsToldTo": bug(dict, on_inserts=also(lambda s, keys, sizes, chunks, facts: facts.hint == "keep" and s.more.update(dict.fromkeys(keys))), on_remove=also(lambda s, key: s.more.pop(key, None)), victims=lambda s, right: iter(sorted(right(), key=s.more.__contains__))),
    # threads
    "HoldsALockOverYield": bug(threading.Lock, victims=lambda s, right: under(s.more, right()), on_insert=before(lambda s, key, n: s.more.acquire() and s.more.release())),
    "HoldsItsThreadsLockOverYield": bug(threading.RLock, victims=lambda s, right: under(s.more, right()), on_access=before(lambda s, key: s.more.acquire() and s.more.release())),
    "BelongsToTheThreadOfItsFirstCall": bug(threading.get_ident, on_insert=before(lambda s, key, n: s.more == threading.get_ident() or 1 / 0)),
    # what an author's first policy gets wrong
    "OffersWhatLeft": bug(on_remove=also(lambda s, key: s.more.append(key)), victims=lambda s, right: chain(right(), (k for k in s.more[-1:] if k not in s.order))),
    "OffersTheUsedTwice": bug(on_insert=also(lambda s, key, n: s.more.append(key)), on_access=lambda s, right, key: s.more.append(key), victims=lambda s, right: (k for k in s.more if k in s.order)),
    "HidesTheHot": bug(Counter, on_access=lambda s, right, key: s.more.update([key]), on_remove=also(lambda s, key: s.more.pop(key, None)), victims=lambda s, right: (k for k in s.order if s.more[k] < 4)),
    "RemembersRemovedKeysAsIn": bug(set, on_insert=lambda s, right, key, n: None if key in s.more else (s.more.add(key), right(key, n)), on_access=nothing, on_remove=no_more),
    "GoesByIdentity": bug(dict, on_insert=lambda s, right, key, n: s.more.update({id(key): key}), on_access=lambda s, right, key: s.more[id(key)], on_remove=lambda s, right, key: s.more.pop(id(key)), victims=lambda s, right: iter(s.more.values())),
    "GoesByTheDigestAlone": bug(on_insert=lambda s, right, key, n: None if any(k[40:] == key[40:] for k in s.order) else right(key, n), on_access=nothing, on_remove=no_more),
    "SharesItsQueue": type("Bug", (Right,), {"__init__": lambda self: setattr(self, "order", EVERYBODYS)}),
    "OfferingIsRemoving": bug(on_remove=no_more, on_access=only_known, victims=lambda s, right: taken_out(s)),
    "PutsBackWhenTheWalkEnds": bug(on_access=only_known, victims=lambda s, right: put_back(s)),
    "LosesCountOfBytes": bug(lambda: [0], on_insert=also(lambda s, key, n: s.more.append(s.more.pop() + n & 0xFFFFFFFF)), on_remove=lambda s, right, key: s.more.append(s.more.pop() - s.order.pop(key)), victims=lambda s, right: right() if s.more[0] > 0 else iter(())),
    "SearchesOnUse": bug(on_insert=lambda s, right, key, n: s.more.append(key), on_access=lambda s, right, key: (s.more.remove(key), s.more.append(key)), on_remove=lambda s, right, key: s.more.remove(key), victims=lambda s, right: iter(list(s.more))),
    "SortsForEachVictim": bug(on_access=lambda s, right, key: (s.more.append(0), s.order.__setitem__(key, len(s.more))), victims=lambda s, right: iter(sorted(s.order, key=s.order.__getitem__))),
    "SearchesOnRemoval": bug(on_remove=lambda s, right, key: [s.order.pop(k) for k in list(s.order) if k == key]),
    "TidiesUpOnEachInsert": bug(on_insert=before(lambda s, key, n: setattr(s, "order", {k: size for k, size in s.order.items() if k != key}))),
    "NeverForgets": bug(Counter, on_access=also(lambda s, key: s.more.update([key]))),
    "KnowsOneThread": KnowsOneThread,
}
# fmt: on
LIMITS = dict.fromkeys(("HoldsALockOverYield", "Sleeps"), 3.0)
for _name, _bug in BUGS.items():
    globals()[f"Test{_name}"] = type(f"Test{_name}", (Planted,), {"Bug": _bug, "limit_s": LIMITS.get(_name, 60.0)})
