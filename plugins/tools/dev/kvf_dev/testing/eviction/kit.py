"""The settings and fixtures that the author of an eviction policy gives to the kit, and what its tests share. A call
that raises, or that keeps or changes what it was given, fails by its promise."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, TypeVar

import pytest

from kvf_dev.testing.making import NamedKit
from kvframework.api.eviction import EvictionPolicy, EvictionProvider, PackedKey, RequestFacts, Why
from kvframework.api.keys import PACKED_KEY_BYTES

T = TypeVar("T")


class WatchedPolicy(EvictionPolicy):
    """The policy `inner`, as the core calls it: inserts of keys that are not in, the other calls for those that are."""

    def __init__(self, inner: EvictionPolicy) -> None:
        self.inner = inner
        self.name = inner.name

    def on_insert(self, key: PackedKey, nbytes: int) -> None:
        _call("on_insert of a key that is not in", lambda: self.inner.on_insert(key, nbytes))

    def on_access(self, key: PackedKey) -> None:
        _call("on_access of a key that is in", lambda: self.inner.on_access(key))

    def on_access_many(self, keys: Sequence[PackedKey]) -> None:
        _call_with("on_access_many", "of keys that are in", lambda: self.inner.on_access_many(keys), keys)

    def on_remove(self, key: PackedKey) -> None:
        _call("on_remove of a key that is in", lambda: self.inner.on_remove(key))

    def admits(
        self, keys: Sequence[PackedKey], sizes: Sequence[int], chunks: Sequence[int], facts: RequestFacts
    ) -> int:
        ask = lambda: self.inner.admits(keys, sizes, chunks, facts)  # noqa: E731  too long for an argument
        count = _call_with("admits", "of keys that are not in", ask, keys, sizes, chunks)
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= len(keys):
            pytest.fail(f"admits answered {str(count)[:80]} for {len(keys)} keys: a number of the first of them")
        return count

    def on_inserts(
        self, keys: Sequence[PackedKey], sizes: Sequence[int], chunks: Sequence[int], facts: RequestFacts
    ) -> None:
        insert = lambda: self.inner.on_inserts(keys, sizes, chunks, facts)  # noqa: E731  too long for an argument
        _call_with("on_inserts", "of keys that are not in", insert, keys, sizes, chunks)

    def on_uses(self, keys: Sequence[PackedKey], facts: RequestFacts) -> None:
        _call_with("on_uses", "of keys that are in", lambda: self.inner.on_uses(keys, facts), keys)

    def on_removes(self, keys: Sequence[PackedKey], why: Why) -> None:
        _call_with("on_removes", "of keys that are in", lambda: self.inner.on_removes(keys, why), keys)

    def victims(self) -> Iterator[PackedKey]:
        walk = _call("victims", self.inner.victims)
        if not isinstance(walk, Iterator):
            pytest.fail(f"victims answered a {type(walk).__name__}, no iterator")
        return self._walk(walk)

    def _walk(self, walk: Iterator[PackedKey]) -> Iterator[PackedKey]:
        while (key := _call("victims, on the way,", lambda: next(walk, None))) is not None:
            if not isinstance(key, bytes):
                pytest.fail(f"victims offered a {type(key).__name__}, no key")
            yield key


def _call_with(name: str, of: str, call: Callable[[], T], *lists: Sequence[object]) -> T:
    """Make a call that gets these lists, which stay the caller's."""
    __tracebackhide__ = True
    before = [list(each) for each in lists]
    answer = _call(f"{name} {of}", call)
    if [list(each) for each in lists] != before:
        pytest.fail(f"{name} changed the caller's list of keys")
    return answer


def _call(what: str, call: Callable[[], T]) -> T:
    __tracebackhide__ = True
    try:
        return call()
    except Exception as error:  # noqa: BLE001  reported as the test's failure
        text = "a key" if any(isinstance(each, bytes) for each in error.args) else str(error)[:80]
        pytest.fail(f"{what} raised {type(error).__name__} ({text}): a policy that raises breaks the request")


MakePolicy = Callable[[], EvictionPolicy]
MIB = 1 << 20


class EvictionKit(NamedKit):
    """Settings and fixtures of the kit. An author must give either `use` or a `make_policy` fixture."""

    _descriptor = EvictionProvider

    examples: ClassVar[int] = 60
    """How many sequences of calls are compared with a set."""

    remembered_keys: ClassVar[int] = 4096
    """How many keys of removed objects the policy may remember, however few it holds."""

    @pytest.fixture
    def make_policy(self) -> MakePolicy:
        """Return a factory of empty policies."""
        return self.by_name()

    @pytest.fixture
    def policy(self, make_policy: MakePolicy) -> EvictionPolicy:
        """A policy whose calls are watched."""
        return WatchedPolicy(make_policy())


def fresh_keys(count: int) -> list[PackedKey]:
    return [os.urandom(PACKED_KEY_BYTES) for _ in range(count)]


def insert(policy: EvictionPolicy, keys: Iterable[PackedKey], nbytes: int = MIB) -> None:
    for key in keys:
        policy.on_insert(key, nbytes)


def must_offer(policy: EvictionPolicy, keys: Iterable[PackedKey]) -> None:
    """Fail unless the policy offers each of `keys` exactly once and nothing else."""
    wanted, offered = set(keys), set[PackedKey]()
    for key in policy.victims():
        # Not all at once: a walk may have no end.
        assert key not in offered, "a key is offered twice"
        assert key in wanted, "a key is offered that is not in"
        offered.add(key)
    missing = len(wanted - offered)
    assert not missing, f"a key that is in is not offered: {missing} of {len(wanted)}"
