"""The settings and fixtures that the author of a tier gives to the kit, and the methods its tests share."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import pytest

from kvf_dev.testing.faults import FaultProxy
from kvf_dev.testing.kit import NamedKit, must_be_equal, shown
from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.api.plugin import Options
from kvframework.api.tier import (
    OPTIONAL_METHODS,
    Outcome,
    PackedKey,
    TableContext,
    Tier,
    TierEntry,
    TierProvider,
    TierUsage,
)
from kvframework.errors import KVFrameworkError, TierError

T = TypeVar("T")
R = TypeVar("R", bound="int | Outcome")
Parts = Sequence[Sequence[memoryview]]

_UNREAD = {Outcome.MISSING, Outcome.FAILED, Outcome.DAMAGED}
_PERMITTED = {
    "contains": {Outcome.FOUND, *_UNREAD},
    "get_into": _UNREAD,  # or a number of bytes
    "put": {Outcome.STORED, Outcome.FAILED},
    "delete": {Outcome.DELETED, Outcome.MISSING, Outcome.FAILED},
}


class WatchedTier(Tier):
    """The tier `inner`. Fails the test if a call raises another error than `TierError`, ends `grace_s` seconds after
    its deadline, answers by anything but one permitted outcome a key, or changes or releases what is the caller's. A
    call without a deadline has `patience_s` seconds."""

    def __init__(self, inner: Tier, patience_s: float, grace_s: float) -> None:
        self.inner = inner
        self.name = inner.name
        self._patience_s, self._grace_s = patience_s, grace_s

    def contains(self, keys: Sequence[PackedKey], *, deadline: float | None = None) -> list[Outcome]:
        return _outcomes("contains", self._call("contains", deadline, self.inner.contains, keys), keys)

    def get_into(
        self, keys: Sequence[PackedKey], parts: Parts, *, deadline: float | None = None
    ) -> list[int | Outcome]:
        rooms = [sum(part.nbytes for part in parts[index]) for index in range(len(parts))]  # as `_sums`
        answer = self._call("get_into", deadline, self.inner.get_into, keys, parts)
        _sums("get_into", parts)
        outcomes = _outcomes("get_into", answer, keys)
        for outcome, room in zip(outcomes, rooms, strict=True):
            if isinstance(outcome, int) and not 0 <= outcome <= room:
                pytest.fail(f"`get_into` returned {outcome} bytes for a buffer of {room}")
        return outcomes

    def put(self, keys: Sequence[PackedKey], parts: Parts, *, deadline: float | None = None) -> list[Outcome]:
        before = _sums("put", parts)
        answer = self._call("put", deadline, self.inner.put, keys, parts)
        if before != _sums("put", parts):
            pytest.fail("`put` changed the caller's bytes, which it may only read")
        return _outcomes("put", answer, keys)

    def delete(self, keys: Sequence[PackedKey], *, deadline: float | None = None) -> list[Outcome]:
        return _outcomes("delete", self._call("delete", deadline, self.inner.delete, keys), keys)

    def touch(self, keys: Sequence[PackedKey], *, deadline: float | None = None) -> None:
        self._call("touch", deadline, self.inner.touch, keys)

    def usage(self, *, deadline: float | None = None) -> TierUsage:
        found = self._call("usage", deadline, self.inner.usage)
        if not isinstance(found, TierUsage):
            pytest.fail(f"`usage` returned {found!r}, not a TierUsage")
        for name, nbytes in (("used_bytes", found.used_bytes), ("capacity_bytes", found.capacity_bytes)):
            if not _is_number(nbytes) or nbytes < 0:
                pytest.fail(f"{name} of usage() is {nbytes!r}, not a number of bytes")
        return found

    def scan(self, *, deadline: float | None = None) -> Iterator[TierEntry]:
        entries = self._call("scan", deadline, self.inner.scan)
        if not isinstance(entries, Iterator):
            pytest.fail(f"`scan` returned a {type(entries).__name__}, not an iterator")
        return self._entries(entries)

    def capabilities(self) -> frozenset[str]:
        return self.inner.capabilities()

    def ping(self, *, deadline: float | None = None) -> None:
        self._call("ping", deadline, self.inner.ping)

    def close(self) -> None:
        self._timed("close", float("inf"), self.inner.close)

    # What tests do again and again

    def store(self, key: PackedKey, value: bytes) -> None:
        self.store_all({key: value})

    def store_all(self, values: Mapping[PackedKey, bytes]) -> None:
        assert self.put(list(values), parts_of(values.values())) == [Outcome.STORED] * len(values)

    def load(self, key: PackedKey, nbytes: int) -> tuple[int | Outcome, bytes]:
        buffer = bytearray(nbytes)
        (outcome,) = self.get_into([key], parts_of([buffer]))
        return outcome, bytes(buffer)

    def must_answer(self, key: PackedKey, nbytes: int, expected: int | Outcome) -> None:
        outcome, _ = self.load(key, nbytes)
        assert outcome == expected, f"`get_into` of {nbytes} bytes returned {said(outcome)}, not {said(expected)}"

    def must_load(self, key: PackedKey, value: bytes, why: str = "") -> None:
        outcome, found = self.load(key, len(value))
        assert outcome == len(value), (
            f"`get_into` of {len(value)} bytes returned {said(outcome)}: {why or 'the value was stored'}"
        )
        must_be_equal(found, value, why or "`get_into` returned other bytes")

    def listed(self, keys: Collection[PackedKey]) -> dict[PackedKey, TierEntry]:
        found: dict[PackedKey, TierEntry] = {}
        for entry in self.scan():
            if entry.key in keys:
                assert entry.key not in found, "`scan` lists a value twice"
                found[entry.key] = entry
        return found

    def _entries(self, entries: Iterator[TierEntry]) -> Iterator[TierEntry]:
        while (entry := self._timed("scan", float("inf"), partial(next, entries, None))) is not None:
            if not isinstance(entry, TierEntry) or type(entry.key) is not bytes or not _is_number(entry.nbytes):
                pytest.fail(f"`scan` listed {entry!r}, not a TierEntry with a key of bytes and a number of bytes")
            yield entry

    def _call(self, name: str, deadline: float | None, call: Callable[..., T], *arguments: object) -> T:
        __tracebackhide__ = True
        if deadline is None:
            deadline = time.monotonic() + self._patience_s
        return self._timed(name, deadline, partial(call, *arguments, deadline=deadline))

    def _timed(self, name: str, deadline: float, call: Callable[[], T]) -> T:
        __tracebackhide__ = True
        deadline = max(deadline, time.monotonic())
        try:
            return call()
        except TierError:
            raise
        except Exception as error:  # noqa: BLE001  reported as the test's failure
            pytest.fail(
                f"`{name}` raised {shown(error)}: a failure of one key must be FAILED, and an operation"
                " that fails as a whole must raise TierError"
            )
        finally:
            late = time.monotonic() - deadline
            if late > self._grace_s:
                pytest.fail(f"`{name}` ended {late:.1f} s after its deadline")


def parts_of(buffers: Iterable[bytes | bytearray]) -> list[list[memoryview]]:
    return [[memoryview(buffer)] for buffer in buffers]


def said(outcome: object) -> str:
    return outcome.name if isinstance(outcome, Outcome) else f"{outcome} bytes"


def _outcomes(name: str, answer: list[R], keys: Sequence[PackedKey]) -> list[R]:
    __tracebackhide__ = True
    if not isinstance(answer, list):
        pytest.fail(f"{name} returned a {type(answer).__name__}, not a list of outcomes")
    if len(answer) != len(keys):
        pytest.fail(f"{name} returned {len(answer)} outcomes for {len(keys)} keys, not one for each key")
    for outcome in answer:
        if not (
            outcome in _PERMITTED[name] if isinstance(outcome, Outcome) else name == "get_into" and _is_number(outcome)
        ):
            pytest.fail(f"`{name}` returned {outcome!r}, which is not one of its outcomes")
    return answer


def _sums(name: str, parts: Parts) -> list[list[int]]:
    """Return checksums of the caller's memory; fail if it was released."""
    try:
        # By index: a test may watch whether the tier iterates.
        return [[zlib.crc32(part) for part in parts[index]] for index in range(len(parts))]
    except ValueError:
        pytest.fail(f"`{name}` released a memoryview of the caller")


def _is_number(answer: object) -> bool:
    return isinstance(answer, int) and not isinstance(answer, bool)


FOUND, MISSING, STORED = Outcome.FOUND, Outcome.MISSING, Outcome.STORED
DELETED, FAILED, DAMAGED = Outcome.DELETED, Outcome.FAILED, Outcome.DAMAGED

# The calls that have a deadline. Those of keys are made with one key, and with none.
_OF_KEYS = ("contains", "get_into", "put", "delete", "touch")
EVERY_CALL = (*_OF_KEYS, *(f"{name} of no keys" for name in _OF_KEYS), "ping", "usage", "scan")


class TierKit(NamedKit):
    """Settings and fixtures of the kit. An author must give either `use` or a `tier` fixture."""

    _descriptor = TierProvider
    usual_s = 75.0
    _where = "[[l2]] #1"

    shared: ClassVar[bool] = False
    """Whether several nodes may use the store of a tier that comes from a fixture. With `use`, the provider sets it."""

    persistent: ClassVar[bool] = True
    """Whether values outlive the tier object. With `use`, or with `reopen`, they should."""

    ttl_options: ClassVar[Mapping[str, object] | None] = None
    """With `use`: options, merged over `tier_options`, by which values expire after some seconds."""

    capacity_options: ClassVar[Mapping[str, object] | None] = None
    """With `use`: options, merged over `tier_options`, by which a tier with `usage` holds at most 64 MiB."""

    patience_s: ClassVar[float] = 20.0
    """Seconds to the deadline of every call that should succeed."""

    grace_s: ClassVar[float] = 3.0
    """Seconds by which a call may exceed its deadline, or outlast `close`."""

    time_step_s: ClassVar[float] = 0.05
    """Resolution of the times of use that `scan` reports, in seconds."""

    limit_s: ClassVar[float] = 120.0

    examples: ClassVar[int] = 40
    """How many sequences of calls are compared with a model."""

    # Fixtures that an author may replace

    @pytest.fixture
    def tier_options(self) -> Mapping[str, object]:
        """`options`, as a fixture, for options that depend on other fixtures."""
        return self.options

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        """A working tier; a fixture that replaces this one closes its tier."""
        tier = self.open_by_name()
        yield tier
        tier.close()

    @pytest.fixture
    def ttl_tier(self) -> Tier:
        """A tier whose values expire after some seconds."""
        return self._with(self.ttl_options, "`ttl_options`, by which values expire, or a fixture `ttl_tier`")

    @pytest.fixture
    def small_tier(self) -> Tier:
        """A tier that a test can fill: it holds at most 64 MiB."""
        return self._with(self.capacity_options, "`capacity_options` of at most 64 MiB, or a fixture `small_tier`")

    def _with(self, options: Mapping[str, object] | None, needed: str) -> Tier:
        if not self.use or options is None:
            pytest.skip(f"Define {needed}")
        return self.closed_later(self.open_by_name(options))

    @pytest.fixture
    def faulty_tier(self) -> tuple[Tier, FaultProxy]:
        """A tier that reaches its store through a `FaultProxy`. A fixture that replaces this one closes both."""
        pytest.skip("Define a fixture `faulty_tier` that returns (tier, proxy), if the tier uses a socket")

    def reopen(self, tier: Tier) -> Tier:
        """Return another tier over the store of `tier`, which may be closed by now. The kit closes it."""
        if not self.use:
            pytest.skip("Define `reopen(tier)`: it returns a second tier over the same store")
        return self.open_by_name()

    def damage(self, tier: Tier, key: PackedKey) -> None:
        """Make the stored value of `key` wrong or unreadable below `tier`: cut its file, overwrite its row."""
        pytest.skip("Define `damage(tier, key)`, which makes a stored value wrong or unreadable below the tier")

    # What the kit provides to its tests

    _tier_options: Mapping[str, object]
    _opened: list[Tier]

    @pytest.fixture(autouse=True)
    def _kit(self, tier_options: Mapping[str, object]) -> Iterator[None]:
        self._tier_options, self._opened = tier_options, []
        yield
        for tier in self._opened:
            tier.close()

    @property
    def is_shared(self) -> bool:
        """Whether the tier promises that several nodes may use one store."""
        return self.resolve()[0].shared if self.use else self.shared

    @property
    def can_reopen(self) -> bool:
        return bool(self.use) or type(self).reopen is not TierKit.reopen

    def resolve(self, options: Mapping[str, object] | None = None) -> tuple[TierProvider[Any], Options]:
        return super().resolve({**self._tier_options, **(options or {})})

    def open_by_name(self, more: Mapping[str, object] | None = None) -> Tier:
        provider, options = self.resolve(more)
        tier: Tier = provider.create(options, TableContext(self._where))
        return tier

    def closed_later(self, tier: Tier) -> Tier:
        self._opened.append(tier)
        return tier

    @pytest.fixture
    def watched(self, tier: Tier) -> WatchedTier:
        return self.watch(tier)

    def watch(self, tier: Tier) -> WatchedTier:
        return WatchedTier(tier, self.patience_s, self.grace_s)

    def another(self, tier: WatchedTier) -> WatchedTier:
        other = self.watch(self.reopen(tier.inner))
        self.closed_later(other)
        return other

    def second(self, tier: WatchedTier) -> WatchedTier | None:
        """Return another tier over the store while `tier` is open, or None where a second opener is refused: when it
        opens, or at its first call, as by a tier in a helper process."""
        try:
            second = self.another(tier)
            second.inner.ping(deadline=self.soon())
        except KVFrameworkError:
            return None
        return second

    def fresh_keys(self, count: int) -> list[PackedKey]:
        return [os.urandom(PACKED_KEY_BYTES) for _ in range(count)]

    def soon(self) -> float:
        return time.monotonic() + self.patience_s

    def needs(self, tier: Tier, method: str) -> None:
        if method in OPTIONAL_METHODS and method not in tier.capabilities():
            pytest.skip(f"The tier has no {method}")

    def call(self, tier: WatchedTier, name: str, key: PackedKey, deadline: float | None = None) -> object:
        method, of_none, _ = name.partition(" of no keys")
        self.needs(tier, method)
        keys = [] if of_none else [key]
        arguments: list[object] = [keys] if method in _OF_KEYS else []
        if method in ("get_into", "put"):
            arguments.append(parts_of((bytearray(5) if method == "get_into" else b"other") for _ in keys))
        answer = getattr(tier, method)(*arguments, deadline=deadline)
        return list(answer) if method == "scan" else answer

    def must_raise(self, name: str, call: Callable[[], object], why: str) -> None:
        try:
            answer = call()
        except TierError:
            return
        pytest.fail(f"`{name}` returned {answer!r}; it must raise TierError: {why}")

    def in_threads(self, *works: Callable[[], object], within_s: float | None = None) -> None:
        super().in_threads(*works, within_s=3 * self.patience_s if within_s is None else within_s)
