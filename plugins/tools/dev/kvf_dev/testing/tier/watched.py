"""A tier under test: what every call promises, whatever the test, is checked at every call."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

import pytest

from kvf_dev.testing.kit import shown
from kvframework.api.tier import Outcome, PackedKey, Tier, TierEntry, TierUsage
from kvframework.errors import TierError

T = TypeVar("T")
R = TypeVar("R", bound="int | Outcome")
Parts = Sequence[Sequence[memoryview]]

# By outcome: what it says.
_MEANS = {
    Outcome.FOUND: "there is a value",
    Outcome.MISSING: "there is no value",
    Outcome.STORED: "nothing hinders it",
    Outcome.DELETED: "there was a value",
    Outcome.FAILED: "it could not be stored",
    Outcome.DAMAGED: "the value is longer than its parts",
}

_UNREAD = (Outcome.MISSING, Outcome.FAILED, Outcome.DAMAGED)


class Answers(list[R]):
    """The outcomes of a call, which say whose they are where an assertion shows them."""

    def __init__(self, call: str, outcomes: Sequence[R], keys: Sequence[PackedKey]) -> None:
        super().__init__(outcomes)
        self._call, self._keys = call, keys

    def differs_from(self, expected: Sequence[object]) -> str:
        """Return the first outcome that is another one, and why, in a sentence."""
        for at, (found, wanted) in enumerate(zip(self, expected, strict=False)):
            if found != wanted:
                first = self._keys.index(self._keys[at])
                twice = f", which is key {first + 1} again: one after the other" if first != at else ""
                return f"{self._call} answered {said(found)} for key {at + 1} of {len(self)}{twice}; {due(wanted)}"
        return f"{self._call} gave {len(self)} outcomes; right are {len(expected)}"

    def __repr__(self) -> str:
        shown = [each.name if isinstance(each, Outcome) else str(each) for each in self[:12]]
        return f"{self._call}: [{', '.join(shown)}{', ...' if len(self) > 12 else ''}]"


class WatchedTier(Tier):
    """The tier `inner`. Fails the test if a call raises another error than `TierError`, ends `grace_s` seconds after
    its deadline, answers by anything but one permitted outcome a key, or changes or releases what is the caller's."""

    def __init__(self, inner: Tier, grace_s: float) -> None:
        self.inner = inner
        self.name = inner.name
        self._grace_s = grace_s

    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        answer = self._call("contains", lambda: self.inner.contains(keys, deadline=deadline), deadline)
        return self._outcomes("contains", answer, keys, (Outcome.FOUND, *_UNREAD))

    def get_into(self, keys: Sequence[PackedKey], parts: Parts, *, deadline: float) -> list[int | Outcome]:
        rooms = [sum(part.nbytes for part in each) for each in parts]
        answer = self._call("get_into", lambda: self.inner.get_into(keys, parts, deadline=deadline), deadline)
        self._still_usable("get_into", parts)
        outcomes = self._outcomes("get_into", answer, keys, _UNREAD, numbers=True)
        for outcome, room in zip(outcomes, rooms, strict=True):
            if isinstance(outcome, int) and not 0 <= outcome <= room:
                pytest.fail(f"get_into received {outcome} bytes into a place of {room}")
        return outcomes

    def put(self, keys: Sequence[PackedKey], parts: Parts, *, deadline: float) -> list[Outcome]:
        before = _sums(parts)
        answer = self._call("put", lambda: self.inner.put(keys, parts, deadline=deadline), deadline)
        self._still_usable("put", parts)
        if before != _sums(parts):
            pytest.fail("put changed the bytes of the caller, which are only lent to be read")
        return self._outcomes("put", answer, keys, (Outcome.STORED, Outcome.FAILED))

    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        answer = self._call("delete", lambda: self.inner.delete(keys, deadline=deadline), deadline)
        return self._outcomes("delete", answer, keys, (Outcome.DELETED, Outcome.MISSING, Outcome.FAILED))

    def touch(self, keys: Sequence[PackedKey], *, deadline: float) -> None:
        self._call("touch", lambda: self.inner.touch(keys, deadline=deadline), deadline)

    def usage(self, *, deadline: float) -> TierUsage:
        found = self._call("usage", lambda: self.inner.usage(deadline=deadline), deadline)
        if not isinstance(found, TierUsage):
            pytest.fail(f"usage answered {found!r}, no TierUsage")
        for name, nbytes in (("used_bytes", found.used_bytes), ("capacity_bytes", found.capacity_bytes)):
            if not _is_number(nbytes) or nbytes < 0:
                pytest.fail(f"{name} of usage is {nbytes!r}, no number of bytes")
        return found

    def scan(self, *, deadline: float) -> Iterator[TierEntry]:
        entries = self._call("scan", lambda: self.inner.scan(deadline=deadline), deadline)
        if not isinstance(entries, Iterator):
            pytest.fail(f"scan answered a {type(entries).__name__}, no iterator")
        return self._entries(entries)

    def capabilities(self) -> frozenset[str]:
        return self.inner.capabilities()

    def ping(self, *, deadline: float) -> None:
        self._call("ping", lambda: self.inner.ping(deadline=deadline), deadline)

    def close(self) -> None:
        self._call("close", self.inner.close, float("inf"))

    def _entries(self, entries: Iterator[TierEntry]) -> Iterator[TierEntry]:
        while True:
            entry = self._call("scan", lambda: next(entries, None), float("inf"))
            if entry is None:
                return
            if not isinstance(entry, TierEntry) or type(entry.key) is not bytes or not _is_number(entry.nbytes):
                pytest.fail(f"scan listed {entry!r}, no TierEntry of a key of bytes and a number of bytes")
            yield entry

    def _call(self, name: str, call: Callable[[], T], deadline: float) -> T:
        __tracebackhide__ = True
        deadline = max(deadline, time.monotonic())
        try:
            return call()
        except TierError:
            raise
        except Exception as error:  # noqa: BLE001  reported as the test's failure
            pytest.fail(
                f"{name} raised {shown(error)}: what fails for one key is FAILED, and an operation"
                " that fails as a whole raises TierError"
            )
        finally:
            late = time.monotonic() - deadline
            if late > self._grace_s:
                pytest.fail(f"{name} ended {late:.1f} s after its deadline")

    def _outcomes(
        self,
        name: str,
        answer: Sequence[R],
        keys: Sequence[PackedKey],
        known: Collection[Outcome],
        *,
        numbers: bool = False,
    ) -> list[R]:
        __tracebackhide__ = True
        if not isinstance(answer, list):
            pytest.fail(f"{name} answered a {type(answer).__name__}, no list of outcomes")
        if len(answer) != len(keys):
            pytest.fail(f"{name} answered {len(answer)} outcomes for {len(keys)} keys: one for each key, in order")
        for outcome in answer:
            if not (outcome in known if isinstance(outcome, Outcome) else numbers and _is_number(outcome)):
                pytest.fail(f"{outcome!r} is no outcome of {name}")
        return Answers(name, answer, keys)

    @staticmethod
    def _still_usable(name: str, parts: Parts) -> None:
        try:
            for index in range(len(parts)):
                for part in parts[index]:
                    part.nbytes  # noqa: B018  raises if it was released
        except ValueError:
            pytest.fail(f"{name} released a memoryview of the caller's")


def said(outcome: object) -> str:
    """Return an outcome in words."""
    return outcome.name if isinstance(outcome, Outcome) else f"{outcome} bytes"


def due(outcome: object) -> str:
    """Return which outcome is right, and why."""
    why = _MEANS[outcome] if isinstance(outcome, Outcome) else "as many as were received, whatever was expected"
    return f"right is {said(outcome)}: {why}"


def _sums(parts: Parts) -> list[list[int]]:
    # By index: a test may watch whether the tier iterates.
    return [[zlib.crc32(part) for part in parts[index]] for index in range(len(parts))]


def _is_number(answer: object) -> bool:
    return isinstance(answer, int) and not isinstance(answer, bool)
