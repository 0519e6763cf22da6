"""A tier under test: what every call promises, whatever the test, is checked at every call."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import pytest

from kvf_dev.testing.kit import must_be_equal, shown
from kvframework.api.tier import Outcome, PackedKey, Tier, TierEntry, TierUsage
from kvframework.errors import TierError

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
        rooms = [sum(part.nbytes for part in each) for each in parts]
        answer = self._call("get_into", deadline, self.inner.get_into, keys, parts)
        _sums("get_into", parts)
        outcomes = _outcomes("get_into", answer, keys)
        for outcome, room in zip(outcomes, rooms, strict=True):
            if isinstance(outcome, int) and not 0 <= outcome <= room:
                pytest.fail(f"get_into returned {outcome} bytes for a buffer of {room}")
        return outcomes

    def put(self, keys: Sequence[PackedKey], parts: Parts, *, deadline: float | None = None) -> list[Outcome]:
        before = _sums("put", parts)
        answer = self._call("put", deadline, self.inner.put, keys, parts)
        if before != _sums("put", parts):
            pytest.fail("put changed the caller's bytes, which it may only read")
        return _outcomes("put", answer, keys)

    def delete(self, keys: Sequence[PackedKey], *, deadline: float | None = None) -> list[Outcome]:
        return _outcomes("delete", self._call("delete", deadline, self.inner.delete, keys), keys)

    def touch(self, keys: Sequence[PackedKey], *, deadline: float | None = None) -> None:
        self._call("touch", deadline, self.inner.touch, keys)

    def usage(self, *, deadline: float | None = None) -> TierUsage:
        found = self._call("usage", deadline, self.inner.usage)
        if not isinstance(found, TierUsage):
            pytest.fail(f"usage() returned {found!r}, not a TierUsage")
        for name, nbytes in (("used_bytes", found.used_bytes), ("capacity_bytes", found.capacity_bytes)):
            if not _is_number(nbytes) or nbytes < 0:
                pytest.fail(f"{name} of usage() is {nbytes!r}, not a number of bytes")
        return found

    def scan(self, *, deadline: float | None = None) -> Iterator[TierEntry]:
        entries = self._call("scan", deadline, self.inner.scan)
        if not isinstance(entries, Iterator):
            pytest.fail(f"scan returned a {type(entries).__name__}, not an iterator")
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
        """Put all `values` in one batch; fail unless each is STORED."""
        assert self.put(list(values), parts_of(values.values())) == [Outcome.STORED] * len(values)

    def load(self, key: PackedKey, nbytes: int) -> tuple[int | Outcome, bytes]:
        """Return the number of bytes received, or the outcome, and the content of a buffer of `nbytes`."""
        buffer = bytearray(nbytes)
        (outcome,) = self.get_into([key], parts_of([buffer]))
        return outcome, bytes(buffer)

    def must_answer(self, key: PackedKey, nbytes: int, expected: int | Outcome) -> None:
        """Fail unless a get into `nbytes` ends so."""
        outcome, _ = self.load(key, nbytes)
        assert outcome == expected, f"get_into of {nbytes} bytes returned {said(outcome)}, not {said(expected)}"

    def must_load(self, key: PackedKey, value: bytes, why: str = "") -> None:
        """Fail unless `value` is found."""
        outcome, found = self.load(key, len(value))
        assert outcome == len(value), (
            f"get_into of {len(value)} bytes returned {said(outcome)}: {why or 'the value was stored'}"
        )
        must_be_equal(found, value, why or "get_into returned other bytes")

    def listed(self, keys: Collection[PackedKey]) -> dict[PackedKey, TierEntry]:
        """Return what `scan` lists under `keys`; fail if one of them is listed twice."""
        found: dict[PackedKey, TierEntry] = {}
        for entry in self.scan():
            if entry.key in keys:
                assert entry.key not in found, "scan lists a value twice"
                found[entry.key] = entry
        return found

    def _entries(self, entries: Iterator[TierEntry]) -> Iterator[TierEntry]:
        while (entry := self._timed("scan", float("inf"), partial(next, entries, None))) is not None:
            if not isinstance(entry, TierEntry) or type(entry.key) is not bytes or not _is_number(entry.nbytes):
                pytest.fail(f"scan listed {entry!r}, not a TierEntry with a key of bytes and a number of bytes")
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
                f"{name} raised {shown(error)}: a failure of one key must be FAILED, and an operation"
                " that fails as a whole must raise TierError"
            )
        finally:
            late = time.monotonic() - deadline
            if late > self._grace_s:
                pytest.fail(f"{name} ended {late:.1f} s after its deadline")


def parts_of(buffers: Iterable[bytes | bytearray]) -> list[list[memoryview]]:
    """Return values as a tier is given them, one part each."""
    return [[memoryview(buffer)] for buffer in buffers]


def said(outcome: object) -> str:
    """Return an outcome in words."""
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
            pytest.fail(f"{name} returned {outcome!r}, which is not one of its outcomes")
    return answer


def _sums(name: str, parts: Parts) -> list[list[int]]:
    """Return checksums of the caller's memory; fail if it was released."""
    try:
        # By index: a test may watch whether the tier iterates.
        return [[zlib.crc32(part) for part in parts[index]] for index in range(len(parts))]
    except ValueError:
        pytest.fail(f"{name} released a memoryview of the caller")


def _is_number(answer: object) -> bool:
    return isinstance(answer, int) and not isinstance(answer, bool)
