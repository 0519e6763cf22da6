"""The kit over tiers that are wrong in one way each, a line a bug. Run by pytest outside of the repository; all must
fail."""
# ruff: noqa: ARG005, E501  the arguments of all bugs are the same, and each is one line

from __future__ import annotations

import contextlib
import mmap
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
from memory_tier import MemoryTier, Store, Value

from kvf_dev.testing import TierConformance
from kvframework.api.tier import Outcome, Tier, TierEntry, TierUsage
from kvframework.errors import TierError

FOUND, MISSING, STORED, DELETED, FAILED, DAMAGED = (
    Outcome.FOUND,
    Outcome.MISSING,
    Outcome.STORED,
    Outcome.DELETED,
    Outcome.FAILED,
    Outcome.DAMAGED,
)


class Planted(TierConformance):
    """Two tiers of the class `Bug` share a store; nothing waits for long."""

    Bug: type[MemoryTier]
    patience_s = 1.0
    grace_s = 0.3
    time_step_s = 0.01
    capacity = 1 << 30

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        tier = self.Bug(Store(), capacity=self.capacity)
        yield tier
        with contextlib.suppress(TierError):
            tier.close()

    @pytest.fixture
    def ttl_tier(self) -> Tier:
        return self.Bug(Store(), ttl_s=0.25)

    @pytest.fixture
    def small_tier(self) -> Tier:
        return self.Bug(Store(), capacity=1 << 20)

    def reopen(self, tier: Tier) -> Tier:
        assert isinstance(tier, MemoryTier)
        return self.Bug(tier.store)

    def damage(self, tier: Tier, key: bytes) -> None:
        tier.damage(key)  # type: ignore[attr-defined]


class VendorError(OSError):
    """A client library's own."""


class Counting(MemoryTier):
    """A correct tier that keeps its sum of bytes."""

    def __init__(self, store: Store, **settings: Any) -> None:
        super().__init__(store, **settings)
        self.sum = sum(len(value.data) for value in store.values.values())

    def put_one(self, key: bytes, parts: Any) -> Outcome:
        value = b"".join(parts)
        with self.store.lock:
            used = self.sum - len(self.store.values.get(key, Value(b"", 0.0)).data) + len(value)
            if used > self.capacity:
                return FAILED
            self.store.values[key], self.sum = Value(value, time.time()), used
        return STORED

    def delete_one(self, key: bytes) -> Outcome:
        with self.store.lock:
            value = self.store.values.pop(key, None)
            self.sum -= len(value.data) if value else 0
        return MISSING if value is None else DELETED

    def used(self) -> int:
        return self.sum


def bug(
    base: type[MemoryTier] = MemoryTier, state: Callable[[], Any] = dict, **calls: Callable[..., Any]
) -> type[MemoryTier]:
    """A tier whose `calls` get the correct one first, and the tier; `state()` is its attribute `more`."""

    def replaced(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        right = getattr(base, name)
        return lambda self, *args, **named: call(
            lambda *more, **other: right(self, *more, **(other or named)), self, *args
        )

    def init(self: Any, store: Store, **settings: Any) -> None:
        self.more = state()
        base.__init__(self, store, **settings)

    return type("Bug", (base,), {"__init__": init, **{name: replaced(name, call) for name, call in calls.items()}})


def keyed(part: Callable[[bytes], bytes]) -> type[MemoryTier]:
    """Stores under a part, or another form, of the key."""
    return bug(in_time=lambda right, s, keys, deadline: (part(key).ljust(72, b"\x01") for key in right(keys, deadline)))


def stored(change: Callable[[bytes], bytes]) -> type[MemoryTier]:
    return bug(put_one=lambda right, s, key, parts: right(key, [memoryview(change(b"".join(parts)))]))


def arena(part: memoryview) -> memoryview:
    return memoryview(part.obj).cast("B")


def beyond(s: Any, key: bytes, parts: Any, at: int) -> None:
    """As native code does that copies the whole value to where the last part begins."""
    whole, last = arena(parts[-1]), parts[-1]
    probe = last[-1]
    last[-1] = probe ^ 0xFF
    end = next(
        (
            i
            for i in range(len(whole))
            if whole[i] == probe ^ 0xFF and bytes(whole[max(0, i + 1 - last.nbytes) : i + 1]) == bytes(last)
        ),
        None,
    )
    last[-1] = probe
    if end is not None and 0 <= end + at < len(whole):
        whole[end + at] = 0


def two_steps(s: Any, key: bytes, parts: Any) -> Outcome:
    """The metadata is visible before the value."""
    value = b"".join(parts)
    s.store.values[key] = Value(
        value[:1] * len(value)
        if not s.store.values.get(key)
        else s.store.values[key].data[: len(value)].ljust(len(value), b"\0"),
        0.0,
    )
    time.sleep(0)
    s.store.values[key] = Value(value, time.time())
    return STORED


def out_of_step(s: Any, key: bytes, parts: Any) -> Outcome:
    value = b"".join(parts)
    s.more[key] = len(value)
    time.sleep(0)
    s.store.values[key] = Value(value, time.time())
    return STORED


def by_size(s: Any, key: bytes, parts: Any, right: Any) -> Any:
    """Takes the size from one table and the bytes from another."""
    size, value = s.more.get(key), s.value(key)
    if size is None or value is None:
        return MISSING
    return (
        right(key, parts) if size == len(value) or size > sum(p.nbytes for p in parts) else (right(key, parts), size)[1]
    )


def in_pieces(s: Any, key: bytes, parts: Any) -> Outcome:
    value = b"".join(parts)
    for end in (len(value) // 2, len(value)):
        s.store.values[key] = Value(value[:end], time.time())
        time.sleep(0)
    return STORED


def gone_meanwhile(s: Any, key: bytes, parts: Any, right: Any) -> Outcome:
    s.store.values.pop(key, None)
    return right(key, parts)


def scratch(s: Any, key: bytes, parts: Any, right: Any) -> Any:
    s.more = s.value(key)
    if s.more is None:
        return MISSING
    room = sum(part.nbytes for part in parts)
    value = s.more
    if value is None or len(value) > room:
        return DAMAGED if value else MISSING
    rest = memoryview(value)
    for part in parts:
        size = min(part.nbytes, rest.nbytes)
        part[:size], rest = rest[:size], rest[size:]
    time.sleep(0.0001)  # another thread has its turn: by chance alone it had none in some runs
    return len(s.more or b"")


def bare_touch(s: Any, key: bytes) -> None:
    value = s.value(key)
    if value is not None:
        time.sleep(0)
        s.store.values[key] = Value(value, time.time())


def unlocked(s: Any, key: bytes, parts: Any) -> Outcome:
    value, used = b"".join(parts), s.used()
    time.sleep(0.0001)  # another thread has its turn: by chance alone it had none in some runs
    old = len(s.store.values.get(key, Value(b"", 0.0)).data)
    if used - old + len(value) > s.capacity:
        return FAILED
    s.store.values[key] = Value(value, time.time())
    s.sum = used - old + len(value)
    return STORED


def paged(s: Any, size: int, dropped: int = 0) -> Iterator[TierEntry]:
    """By offset: what is deleted meanwhile moves the rest forward."""
    at = 0
    while page := list(islice(list(s.store.values.items()), at, at + size)):
        yield from (TierEntry(key, len(value.data), value.used_at) for key, value in page)
        at += size - dropped


def under(lock: Any, s: Any, entries: Iterator[TierEntry]) -> Iterator[TierEntry]:
    with lock:
        yield from entries


def locked(right: Any, s: Any, *args: Any) -> Any:
    with s.more:
        return right(*args)


def locked_store(right: Any, s: Any, *args: Any) -> Any:
    """One writer at a time, whoever opened the store."""
    with vars(s.store).setdefault("writer", threading.Lock()):
        return right(*args)


def waiting(right: Any, s: Any, keys: Any, parts: Any) -> Any:
    """Waits for the transaction of a scan, as a database with one writer does."""
    end = time.monotonic() + 0.8
    while s.more.get("scanning") and not s.closed:
        if time.monotonic() > end:
            raise TierError("database is locked")
        time.sleep(0.01)
    return right(keys, parts)


def transaction(s: Any, entries: Iterator[TierEntry]) -> Iterator[TierEntry]:
    s.more["scanning"] = True
    try:
        yield from entries
    finally:
        s.more["scanning"] = False


def full(error: Callable[[], BaseException]) -> type[MemoryTier]:
    """What the store raises when it is full leaves the tier."""

    def put_one(right: Any, s: Any, key: bytes, parts: Any) -> Any:
        outcome = right(key, parts)
        if outcome is FAILED:
            raise error()
        return outcome

    return bug(put_one=put_one)


def raising(
    error: Callable[[], BaseException], when: Callable[[Any, bytes], bool], call: str = "get_one"
) -> type[MemoryTier]:
    def replaced(right: Any, s: Any, key: bytes, *args: Any) -> Any:
        if when(s, key):
            raise error()
        return right(key, *args)

    return bug(**{call: replaced})


def refused_whole(right: Any, s: Any, keys: Any, parts: Any) -> Any:
    outcomes = right(keys, parts)
    if FAILED in outcomes and len(keys) > 1:
        for key in keys:
            s.store.values.pop(key, None)
        return [FAILED] * len(keys)
    return outcomes


def pooled(right: Any, s: Any, *args: Any) -> Any:
    """A pool of four connections, which does not wait for a free one."""
    if not s.more.acquire(blocking=False):
        raise TierError("too many connections")
    try:
        time.sleep(0.0005)
        return right(*args)
    finally:
        s.more.release()


def lost_place(right: Any, s: Any, *args: Any) -> Any:
    """A place in the pool is not given back by a call that fails."""
    if not s.more.acquire(timeout=0.5):
        raise TierError("no connection is free")
    answer = right(*args)
    s.more.release()
    return answer


def each_its_own(seconds: float) -> Callable[..., Any]:
    """The deadline is checked once, whatever the batch takes."""

    def call(right: Any, s: Any, keys: Any, *args: Any) -> Any:
        s.check(time.monotonic() + 1)
        time.sleep(seconds * len(keys))
        return right(keys, *args, deadline=time.monotonic() + 10) if len(keys) > 900 else right(keys, *args)

    return call


def negative(right: Any, s: Any, keys: Any, *args: Any) -> Any:
    answers = right(keys, *args)
    s.more.update(key for key, answer in zip(keys, answers, strict=True) if answer is MISSING)
    return [MISSING if key in s.more else answer for key, answer in zip(keys, answers, strict=True)]


def throw(error: BaseException) -> Any:
    raise error


def room(parts: Any) -> int:
    return sum(part.nbytes for part in parts)


def filled(parts: Any, value: bytes) -> int:
    rest = memoryview(value)
    for part in parts:
        size = min(part.nbytes, rest.nbytes)
        part[:size], rest = rest[:size], rest[size:]
    return len(value)


def slowly(s: Any, keys: Any, deadline: float) -> Iterator[bytes]:
    """The deadline is looked at once."""
    s.check(deadline)
    for key in keys:
        time.sleep(0.001)
        yield key


def in_place(right: Any, s: Any, key: bytes, parts: Any) -> Outcome:
    """Writes a value over the old one, one half after the other."""
    new, old = b"".join(parts), s.value(key)
    if old is None or len(old) != len(new):
        return right(key, parts)
    half = len(new) // 2
    s.store.values[key] = Value(new[:half] + old[half:], 0.0)
    time.sleep(0.001)
    old = s.value(key) or new
    s.store.values[key] = Value(old[:half] + new[half:], 0.0)
    return STORED


def half_first(right: Any, s: Any, key: bytes, parts: Any) -> Outcome:
    value = b"".join(parts)
    right(key, [memoryview(value)[: len(value) // 2]])
    time.sleep(0.001)
    return right(key, parts)


def cut_and_deleted(right: Any, s: Any, key: bytes) -> Outcome:
    if (value := s.value(key)) is not None:
        s.store.values[key] = Value(value[:10], 0.0)
        time.sleep(0.001)
    return right(key)


def deleted_twice(right: Any, s: Any, key: bytes) -> Outcome:
    found = key in s.store.values
    time.sleep(0.001)
    right(key)
    return DELETED if found else MISSING


def end_lost(right: Any, s: Any, key: bytes, parts: Any) -> Any:
    """Tells the length that was stored; what it received is less."""
    value, before = s.value(key) or b"", [bytes(part) for part in parts]
    outcome = right(key, parts)
    if len(value) > 60_000 and not isinstance(outcome, Outcome):
        parts[-1][-1:] = before[-1][-1:]
    return outcome


def spoilt_behind(right: Any, s: Any, keys: Any, parts: Any) -> Any:
    outcomes = right(keys, parts)
    bad = outcomes.index(DAMAGED) if DAMAGED in outcomes else len(outcomes)
    return outcomes[: bad + 1] + [FAILED] * (len(outcomes) - bad - 1)


def first_of_two(right: Any, s: Any, keys: Any, parts: Any) -> Any:
    last_first = dict(zip(reversed(keys), reversed(parts), strict=True))
    right(list(last_first), list(last_first.values()))
    return [STORED] * len(keys)


def other_error(right: Any, s: Any, deadline: float) -> None:
    try:
        right(deadline)
    except TierError as error:
        raise ConnectionError("no connection") from error


def after_its_end(s: Any, keys: Any, deadline: float) -> Iterator[bytes]:
    for key in keys:
        while s.closed and time.monotonic() < deadline - 0.5:
            time.sleep(0.01)
        s.check(deadline)
        yield key


def remembered(right: Any, s: Any, key: bytes) -> Outcome:
    outcome = FOUND if key in s.more else right(key)
    if outcome is FOUND:
        s.more.add(key)
    return outcome


def not_prolonged(right: Any, s: Any, key: bytes, parts: Any) -> Outcome:
    old, outcome = s.store.values.get(key), right(key, parts)
    if old is not None:
        s.store.values[key] = Value(s.store.values[key].data, old.used_at)
    return outcome


def at_once(self: Any, store: Store, **settings: Any) -> None:
    """Tidies up what a tier that crashed has left, though that tier is at work."""
    MemoryTier.__init__(self, store, **settings)
    others = vars(store).setdefault("openers", [])
    if any(not other.closed for other in others):
        store.values.clear()
    others.append(self)


def over(**methods: Any) -> type[MemoryTier]:
    """A tier with these methods in the place of the right ones."""
    return type("Bug", (MemoryTier,), methods)


# fmt: off
BUGS: dict[str, Any] = {
    # the form of an answer
    "AnswersBools": bug(contains=lambda right, s, keys: [each is FOUND for each in right(keys)]),
    "AnswersTrueForWhatItRead": bug(get_one=lambda right, s, key, parts: True if isinstance(n := right(key, parts), int) else n),
    "AnswersAGenerator": bug(contains=lambda right, s, keys: (each for each in right(keys))),
    "AnswersNoneForNoKeys": bug(put=lambda right, s, keys, parts: right(keys, parts) if keys else None),
    "AnswersAStoredValueByFound": bug(put_one=lambda right, s, key, parts: (right(key, parts), FOUND)[1]),
    "AnswersOneForEachDifferentKey": bug(contains=lambda right, s, keys: right(list(dict.fromkeys(keys)))),
    "AnswersFloats": bug(get_one=lambda right, s, key, parts: float(n) if isinstance(n := right(key, parts), int) else n),
    "AnswersTheRoom": bug(get_one=lambda right, s, key, parts: sum(p.nbytes for p in parts) if isinstance(right(key, parts), int) else MISSING),
    # values
    "StripsZeros": stored(lambda value: value.rstrip(b"\0")),
    "StripsSpaces": stored(lambda value: value.strip(b" \t\n")),
    "StripsLineEnds": stored(lambda value: value.removesuffix(b"\n")),
    "StoresText": stored(lambda value: value.decode(errors="replace").encode()),
    "CutsAt64K": stored(lambda value: value[:65_535] if len(value) == 65_536 else value),
    "RoundsToPages": stored(lambda value: value[: -1] if len(value) % 4096 == 1 else value),
    "LosesTheLastByteOfPages": stored(lambda value: value[:-1] + b"\0" if value and not len(value) % 4096 else value),
    "ReadsNothingBehindAnEmptyPart": bug(put_one=lambda right, s, key, parts: right(key, parts[: next((i for i, p in enumerate(parts) if not p.nbytes), len(parts))])),
    "TakesTheWholeObjectOfAView": bug(put_one=lambda right, s, key, parts: right(key, [memoryview(bytes(arena(p)))[: p.nbytes] for p in parts])),
    "KeepsTheOlderOfEqualLength": bug(put_one=lambda right, s, key, parts: STORED if len(s.value(key) or b"") == sum(p.nbytes for p in parts) != 0 else right(key, parts)),
    "AppendsToTheOlder": bug(put_one=lambda right, s, key, parts: right(key, [memoryview(b"".join(parts) + (s.value(key) or b"")[sum(p.nbytes for p in parts) :])])),
    # keys
    "FoldsTheCaseOfKeys": keyed(bytes.lower),
    "StripsPaddingOfKeys": keyed(lambda key: key.rstrip(b"\0 \n")),
    "DecodesKeys": keyed(lambda key: key.decode("utf-8", "replace").encode()[:200]),
    "KeysAreFileNames": keyed(lambda key: key.replace(b"/", b"_")),
    "KeysEndAtZero": keyed(lambda key: key[:3] + key[3:].partition(b"\0")[0]),
    "IgnoresTheNamespace": keyed(lambda key: key[16:]),
    "IgnoresRankAndGroup": keyed(lambda key: key[:32] + key[40:]),
    "IgnoresTheLastByte": keyed(lambda key: key[:-1]),
    "IgnoresSevenBits": keyed(lambda key: bytes(byte & 0x7F for byte in key)),
    # batches
    "TakesAThousandKeys": bug(contains=lambda right, s, keys: right(keys[:999]) + [MISSING] * max(len(keys) - 999, 0)),
    "RaisesOnManyKeys": bug(contains=lambda right, s, keys: right(keys) if len(keys) < 32_767 else (_ for _ in ()).throw(sqlite3.OperationalError("too many SQL variables"))),
    "TakesListsOnly": bug(contains=lambda right, s, keys: right(keys.copy())),
    "SortsTheCallersKeys": bug(contains=lambda right, s, keys: (keys.sort() if isinstance(keys, list) else None, right(keys))[1]),
    "AnswersInTheOrderOfKeys": bug(get_into=lambda right, s, keys, parts: right(keys, parts) if len(keys) < 3 else [each for _, each in sorted(zip(keys, right(keys, parts), strict=True))]),
    "OneMissSpoilsTheBatch": bug(get_into=lambda right, s, keys, parts: [MISSING] * len(keys) if MISSING in (found := right(keys, parts)) else found),
    "StopsAtTheFirstMiss": bug(delete=lambda right, s, keys: right(keys[: (n := next((i for i, k in enumerate(keys) if s.value(k) is None), len(keys)))]) + [MISSING] * (len(keys) - n)),
    "ReadsTheSecondOfTwoOnly": bug(get_into=lambda right, s, keys, parts: [right([k], [p])[0] if keys.index(k) == i else len(s.value(k) or b"") for i, (k, p) in enumerate(zip(keys, parts, strict=True))]),
    "RefusesTheWholeBatch": bug(put=refused_whole),
    # buffers
    "WritesBehindThePart": bug(get_one=lambda right, s, key, parts: (right(key, parts), beyond(s, key, parts, 1) if parts and parts[-1].nbytes > 8 and not parts[-1].readonly else None)[0]),
    "FillsTheRoomBehindThePart": bug(get_one=lambda right, s, key, parts: (right(key, parts), beyond(s, key, parts, 60) if parts and parts[-1].nbytes > 8 else None)[0]),
    "ReleasesTheCallersViews": bug(get_one=lambda right, s, key, parts: (right(key, parts), [p.release() for p in parts])[0]),
    "ReleasesWhatItStored": bug(put_one=lambda right, s, key, parts: (right(key, parts), [p.release() for p in parts])[0]),
    "NeedsWritableSources": bug(put_one=lambda right, s, key, parts: right(key, parts) if not any(p.readonly for p in parts) else (_ for _ in ()).throw(BufferError("read-only"))),
    "ChangesItsSources": bug(put_one=lambda right, s, key, parts: (right(key, parts), [p.__setitem__(0, p[0] ^ 1) for p in parts if p.nbytes and not p.readonly])[0]),
    # a value is visible whole or not at all
    "PublishesInTwoSteps": bug(put_one=lambda right, s, key, parts: two_steps(s, key, parts)),
    "PublishesHalfFirst": bug(put_one=lambda right, s, key, parts: in_pieces(s, key, parts)),
    "DeletesBeforeItReplaces": bug(put_one=lambda right, s, key, parts: gone_meanwhile(s, key, parts, right)),
    "SizesAndBytesApart": bug(put_one=lambda right, s, key, parts: out_of_step(s, key, parts), get_one=lambda right, s, key, parts: by_size(s, key, parts, right)),
    "IndexBeforeValue": bug(put_one=lambda right, s, key, parts: (s.more.update({key: 1}), time.sleep(0), right(key, parts))[2], contains_one=lambda right, s, key: FOUND if key in s.more or right(key) is FOUND else MISSING, delete_one=lambda right, s, key: (s.more.pop(key, None), right(key))[1]),
    "SharesAScratchBuffer": bug(get_one=lambda right, s, key, parts: scratch(s, key, parts, right)),
    "RemembersMisses": bug(state=set, contains=negative),
    "TouchWritesTheValueBack": bug(touch_one=lambda right, s, key: bare_touch(s, key)),
    "LosesConcurrentWrites": bug(put_one=lambda right, s, key, parts: setattr(s.store, "values", {**s.store.values, key: Value(b"".join(parts), time.time())}) or STORED),
    "HasFourConnections": bug(state=lambda: threading.Semaphore(4), get_into=pooled, put=pooled),
    # deadlines
    "LateGetsOfABatch": bug(get_into=each_its_own(0.001)),
    "LateLookupsOfABatch": bug(contains=each_its_own(0.001)),
    "LateDeletesOfABatch": bug(delete=each_its_own(0.001)),
    "TouchHasNoDeadline": bug(touch=lambda right, s, keys: right(keys, deadline=time.monotonic() + 9) if not s.closed else right(keys)),
    "TouchWorksWhenClosed": bug(touch=lambda right, s, keys: None if s.closed else right(keys)),
    "UsageHasNoDeadline": bug(usage=lambda right, s: TierUsage(s.used(), s.capacity) if not s.closed else right()),
    "AnEmptyPutIsAlwaysRight": bug(put=lambda right, s, keys, parts: right(keys, parts) if keys else []),
    "PingIsAlwaysRight": bug(ping=lambda right, s: None),
    "ALateCallKeepsTheLock": bug(state=lambda: threading.RLock(), put=lambda right, s, *args: [s.more.acquire(timeout=0.5) or s.check(0.0), right(*args), s.more.release()][1]),
    "ALateCallKeepsItsConnection": bug(state=lambda: threading.Semaphore(4), get_into=lost_place),
    "TakesTheDeadlineForATimeout": bug(get_into=lambda right, s, keys, parts: (s.check(time.monotonic() + 1), right(keys, parts, deadline=time.monotonic() + 9))[1]),
    # errors of other classes
    "FullRaisesSqlitesError": full(lambda: sqlite3.OperationalError("database or disk is full")),
    "FullRaisesOsError": full(lambda: OSError(28, "No space left on device")),
    "FullRaisesTheVendorsError": full(lambda: VendorError("OOM command not allowed")),
    "FullRaisesMemoryError": full(lambda: MemoryError()),
    "FullFailsTheWholeOperation": full(lambda: TierError("no room")),
    "AMissRaisesKeyError": raising(lambda: KeyError("no such key"), lambda s, key: s.value(key) is None),
    "AMissRaisesFileNotFound": raising(lambda: FileNotFoundError(2, "No such file"), lambda s, key: s.value(key) is None, "delete_one"),
    "TouchOfAMissRaises": raising(lambda: KeyError("no such key"), lambda s, key: s.value(key) is None, "touch_one"),
    "ClosedRaisesAttributeError": bug(check=lambda right, s, deadline: right(deadline) if not s.closed else None.none),  # type: ignore[attr-defined]
    "LateRaisesTimeoutError": bug(check=lambda right, s, deadline: right(deadline) if s.closed or time.monotonic() < deadline else (_ for _ in ()).throw(TimeoutError("too late"))),
    "AnEmptyValueRaises": raising(lambda: ValueError("cannot map an empty file"), lambda s, key: s.value(key) == b""),
    # capacity
    "CountsReplacedValuesTwice": bug(Counting, put_one=lambda right, s, key, parts: (n := len(s.value(key) or b""), right(key, parts), setattr(s, "sum", s.sum + n))[1]),
    "CountsRefusedValues": bug(Counting, put_one=lambda right, s, key, parts: (out := right(key, parts), setattr(s, "sum", s.sum + 10) if out is FAILED else None)[0]),
    "CountsFromZeroAtEachStart": bug(Counting, usage=lambda right, s: TierUsage(s.sum - s.more.setdefault("at", s.sum), s.capacity)),
    "CountsWithoutALock": bug(Counting, put_one=lambda right, s, key, parts: unlocked(s, key, parts)),
    "CountsMissesOfDelete": bug(Counting, delete_one=lambda right, s, key: (out := right(key), setattr(s, "sum", s.sum - 10) if out is MISSING else None)[0]),
    "CountsEntriesNotBytes": bug(usage=lambda right, s: TierUsage(len(s.store.values), s.capacity)),
    "CountsInFloats": bug(usage=lambda right, s: TierUsage(float(s.used()), s.capacity)),  # type: ignore[arg-type]
    # scans
    "ScansUnderALock": bug(state=lambda: threading.Lock(), scan=lambda right, s: under(s.more, s, right()), put=locked),
    "ScansUnderItsThreadsLock": bug(state=lambda: threading.RLock(), scan=lambda right, s: under(s.more, s, right()), delete=locked),
    "ScansInATransaction": bug(scan=lambda right, s: transaction(s, right()), put=waiting),
    "PagesByOffset": bug(scan=lambda right, s: (s.check(time.monotonic() + 1), right(), paged(s, 100))[2]),
    "PagesOverlap": bug(scan=lambda right, s: (right(), paged(s, 100, 1))[1]),
    "ListsAHundred": bug(scan=lambda right, s: islice(right(), 100)),
    "ListsTuples": bug(scan=lambda right, s: ((e.key, e.nbytes, e.used_at) for e in right())),
    "ListsAList": bug(scan=lambda right, s: list(right())),
    "ListsMilliseconds": bug(scan=lambda right, s: (TierEntry(e.key, e.nbytes, e.used_at * 1000) for e in right())),
    "TouchNotesMilliseconds": bug(touch_one=lambda right, s, key: s.store.values.update({key: Value(v, time.time() * 1000)}) if (v := s.value(key)) is not None else None),
    "ListsMonotonicTimes": bug(scan=lambda right, s: (TierEntry(e.key, e.nbytes, time.monotonic()) for e in right())),
    "ListsTheTimeOfTheScan": bug(scan=lambda right, s: (TierEntry(e.key, e.nbytes, time.time()) for e in right())),
    "ListsTemporaryNames": bug(scan=lambda right, s: (each for e in right() for each in (e, e))),
    "ForgetsTimesOfUse": bug(scan=lambda right, s: (TierEntry(e.key, e.nbytes, max(e.used_at, s.more.setdefault("opened", time.time()))) for e in right())),
    # expiry
    "ATouchMakesItStayForEver": bug(touch_one=lambda right, s, key: s.store.values.update({key: Value(v, time.time() + 1e9)}) if (v := s.value(key)) is not None else None),
    "StoringAgainMakesItStayForEver": bug(put_one=lambda right, s, key, parts: (old := key in s.store.values, right(key, parts), s.store.values.update({key: Value(s.store.values[key].data, time.time() + 1e9)}) if old and s.ttl_s else None)[1]),
    "ATouchRevives": bug(touch_one=lambda right, s, key: s.store.values.update({key: Value(s.store.values[key].data, time.time())}) if key in s.store.values else None),
    "ListsWhatExpired": bug(scan=lambda right, s: (right(), (TierEntry(k, len(v.data), v.used_at) for k, v in list(s.store.values.items())))[1]),
    "CountsWhatExpired": bug(used=lambda right, s: sum(len(v.data) for v in list(s.store.values.values()))),
    "TouchesTheFirstOfABatch": bug(touch=lambda right, s, keys: right(keys[:1])),
    "TouchesShortValuesOnly": bug(touch_one=lambda right, s, key: right(key) if len(s.value(key) or b"") < 1 << 20 else None),
    "AskingProlongs": bug(contains_one=lambda right, s, key: (s.touch_one(key), right(key))[1]),
    # its end
    "CloseHangs": bug(close=lambda right, s: (right(), threading.Event().wait())),
    "CloseRaisesTheSecondTime": bug(close=lambda right, s: right() if not s.closed else (_ for _ in ()).throw(OSError(9, "Bad file descriptor"))),
    "CloseWaitsForCalls": bug(state=lambda: threading.Lock(), close=lambda right, s: (time.sleep(0.6), right())),
    "CloseLeavesAThread": bug(close=lambda right, s: (threading.Thread(target=lambda: time.sleep(5), name="forgotten", daemon=True).start(), right())[1]),
    "NamesItsCapabilitiesInAList": bug(capabilities=lambda right, s: ["scan"]),
    "HasNoName": type("Bug", (MemoryTier,), {"name": ""}),
    "KeepsADescriptorForEachValue": bug(put_one=lambda right, s, key, parts: (s.more.setdefault(key, os.open("/dev/null", os.O_RDONLY)), right(key, parts))[1]),
    # what an author's first tier gets wrong
    "RetainsABuffer": bug(put_one=lambda right, s, key, parts: (s.more.update({key: [p[:] for p in parts]}), right(key, parts))[1]),
    "ReordersOutcomes": bug(contains=lambda right, s, keys: sorted(right(keys), key=lambda each: each.value)),
    "RaisesOnAMiss": raising(lambda: TierError("no such key"), lambda s, key: s.value(key) is None),
    "LiesOnDelete": bug(delete_one=lambda right, s, key: MISSING if s.value(key) is None else DELETED),
    "SaysDeletedOfAnything": bug(delete_one=lambda right, s, key: (right(key), DELETED)[1]),
    "ClosesOnlyOnce": bug(close=lambda right, s: throw(TierError("closed already")) if s.closed else right()),
    "DropsEmptyValues": bug(value=lambda right, s, key: right(key) or None),
    "IgnoresTheDeadline": bug(check=lambda right, s, deadline: right(time.monotonic() + 1.0)),
    "LooksAtTheDeadlineOnce": bug(in_time=lambda right, s, keys, deadline: slowly(s, keys, deadline)),
    "LocksWithoutATimeout": bug(state=lambda: threading.Lock(), put=locked),
    "DeletesBehindAPut": bug(state=threading.Lock, put=locked, delete=locked),
    "LocksTheStoreWithoutATimeout": bug(put=locked_store),
    "UnmapsUnderACall": bug(state=lambda: mmap.mmap(-1, 4096), get_one=lambda right, s, key, parts: (s.more[0], right(key, parts))[1], close=lambda right, s: (right(), s.more.close())[0]),
    "SharesStateBetweenKeys": keyed(lambda key: key[:64]),
    "MixesConcurrentValues": bug(put_one=in_place),
    "PutsInTwoSteps": bug(put_one=half_first),
    "DeletesInTwoSteps": bug(delete_one=cut_and_deleted),
    "DeletesTwice": bug(delete_one=deleted_twice),
    "CutsLongerValues": bug(get_one=lambda right, s, key, parts: MISSING if (v := s.value(key)) is None else filled(parts, v[: room(parts)])),
    "FailsShorterValues": bug(get_one=lambda right, s, key, parts: FAILED if len(s.value(key) or b"") < room(parts) else right(key, parts)),
    "TellsTheLengthOfTheBuffer": bug(get_one=lambda right, s, key, parts: n if isinstance(n := right(key, parts), Outcome) else room(parts)),
    "TellsTheLengthThatWasStored": bug(get_one=end_lost),
    "TellsThatItFound": bug(get_one=lambda right, s, key, parts: n if isinstance(n := right(key, parts), Outcome) else FOUND),
    "ReadsOnlyTheFirstPart": bug(put_one=lambda right, s, key, parts: right(key, parts[:1])),
    "OneLongerValueSpoilsTheBatch": bug(get_into=spoilt_behind),
    "TheFirstOfTwoWins": bug(put=first_of_two),
    "LeaksAFile": bug(state=lambda: os.open("/dev/null", os.O_RDONLY)),
    "LeaksAThread": bug(state=lambda: threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()),
    "LeaksAFileWithoutReopen": bug(put_one=lambda right, s, key, parts: (os.open("/dev/null", os.O_RDONLY), right(key, parts))[1]),
    "KeepsMemory": bug(get_one=lambda right, s, key, parts: (setattr(s, "last", parts), right(key, parts))[1]),
    "KeepsMemoryOfFailedCalls": bug(put=lambda right, s, keys, parts: (setattr(s, "under_way", parts), right(keys, parts), setattr(s, "under_way", ()))[1]),
    "TouchMakesValues": bug(touch_one=lambda right, s, key: s.store.values.update({key: Value(s.value(key) or b"", time.time())})),
    "AskingForgets": bug(contains_one=lambda right, s, key: MISSING if s.store.values.pop(key, None) is None else FOUND),
    "AskingMakesValues": bug(contains_one=lambda right, s, key: (right(key), s.store.values.setdefault(key, Value(b"", 0.0)))[0]),
    "AnswersWhenClosed": bug(close=lambda right, s: None),
    "RaisesAnotherError": bug(check=other_error),
    "GoesOnWhenClosed": bug(in_time=lambda right, s, keys, deadline: after_its_end(s, keys, deadline)),
    "ForgetsWhenClosed": bug(close=lambda right, s: (s.store.values.clear(), right())),
    "ASpoiltValueIsAMiss": bug(get_one=lambda right, s, key, parts: MISSING if s.value(key) == b"spoilt" else right(key, parts)),
    "TheSecondTidiesUp": over(__init__=at_once),
    "KeepsWhatWasSpoilt": bug(delete_one=lambda right, s, key: DELETED),
    "NeverReplaces": bug(put_one=lambda right, s, key, parts: STORED if s.value(key) is not None else right(key, parts), delete_one=lambda right, s, key: DELETED),
    # optional methods and promises that do not hold
    "ClaimsTheUnknown": bug(capabilities=lambda right, s: frozenset({"scan", "speed"})),
    "ClaimsSharing": over(__init__=lambda self, _store, **settings: MemoryTier.__init__(self, Store(), **settings)),
    "ClaimsSharingWithoutProof": MemoryTier,
    "RemembersWhatTheOtherDeleted": bug(state=set, contains_one=remembered, put_one=lambda right, s, key, parts: (right(key, parts), s.contains_one(key))[0]),
    "MixesValuesOfTwo": bug(put_one=in_place),
    "ClaimsTtl": over(__init__=lambda self, store, ttl_s=0.0, capacity=1 << 30: MemoryTier.__init__(self, store, capacity=capacity)),
    "TouchDoesNotProlong": bug(touch_one=lambda right, s, key: None),
    "StoringDoesNotProlong": bug(put_one=not_prolonged),
    "ClaimsUsage": over(usage=lambda self, **named: Tier.usage(self, **named)),
    "CountsNothing": bug(usage=lambda right, s: TierUsage(0, s.capacity)),
    "CountsTheDeleted": bug(state=list, usage=lambda right, s: TierUsage(s.more.append(s.used()) or max(s.more), s.capacity)),
    "SaysStoredWhenFull": bug(put_one=lambda right, s, key, parts: (right(key, parts), STORED)[1]),
    "KnowsNoLimit": bug(put_one=lambda right, s, key, parts: (s.store.values.update({key: Value(b"".join(parts), 0.0)}), STORED)[1]),
    "CannotReplaceWhenFull": bug(put_one=lambda right, s, key, parts: FAILED if s.used() + room(parts) > s.capacity else right(key, parts)),
    "LeaksWhatAShorterValueReplaces": bug(state=list, put_one=lambda right, s, key, parts: (s.more.append(max(len(s.value(key) or b"") - room(parts), 0)), right(key, parts))[1], used=lambda right, s: right() + sum(s.more)),
    "LeaksAPieceOfTheDeletedUncounted": bug(state=list, put_one=lambda right, s, key, parts: FAILED if s.used() + sum(s.more) + room(parts) > s.capacity else right(key, parts), delete_one=lambda right, s, key: (s.more.append(len(s.value(key) or b"") // 2), right(key))[1]),
    "ClaimsScan": over(scan=lambda self, **named: Tier.scan(self, **named)),
    "ListsNothing": bug(scan=lambda right, s: iter(())),
    "ListsOnePage": bug(scan=lambda right, s: islice(right(), 1000)),
    "ListsTheDeleted": bug(scan=lambda right, s: (s.more.update({e.key: e for e in right()}), iter(list(s.more.values())))[1]),
    "ListsOtherSizes": bug(scan=lambda right, s: (TierEntry(e.key, e.nbytes + 80, e.used_at) for e in right())),
    "TouchingIsNoUse": bug(touch_one=lambda right, s, key: None),
    "ListsWhatMoves": bug(scan=lambda right, s: (TierEntry(k, len(v.data), v.used_at) for k, v in s.store.values.items())),
}
# fmt: on
MORE: dict[str, dict[str, Any]] = {
    "CloseHangs": {"limit_s": 5.0},
    "LeaksAFileWithoutReopen": {"reopen": TierConformance.reopen},
    "ClaimsSharingWithoutProof": {"shared": True, "reopen": TierConformance.reopen},
    **{key: {"shared": True} for key in ("ClaimsSharing", "RemembersWhatTheOtherDeleted", "MixesValuesOfTwo")},
}
for _name, _bug in BUGS.items():
    _more = {"Bug": _bug, "limit_s": 60.0, "examples": 20, **MORE.get(_name, {})}
    globals()[f"Test{_name}"] = type(f"Test{_name}", (Planted,), _more)
