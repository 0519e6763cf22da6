"""A policy under test: a call that raises, or that keeps or changes what it was given, fails by its promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pytest

from kvframework.api.eviction import EvictionPolicy, PackedKey

T = TypeVar("T")


class WatchedPolicy(EvictionPolicy):
    """The policy `inner`, as the core calls it: `on_insert` for keys that are not in, the others for those that are."""

    def __init__(self, inner: EvictionPolicy) -> None:
        self.inner = inner
        self.name = inner.name

    def on_insert(self, key: PackedKey, nbytes: int) -> None:
        _call("on_insert of a key that is not in", lambda: self.inner.on_insert(key, nbytes))

    def on_access(self, key: PackedKey) -> None:
        _call("on_access of a key that is in", lambda: self.inner.on_access(key))

    def on_access_many(self, keys: Sequence[PackedKey]) -> None:
        before = list(keys)
        _call("on_access_many of keys that are in", lambda: self.inner.on_access_many(keys))
        if list(keys) != before:
            pytest.fail("on_access_many changed the caller's list of keys")

    def on_remove(self, key: PackedKey) -> None:
        _call("on_remove of a key that is in", lambda: self.inner.on_remove(key))

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


def _call(what: str, call: Callable[[], T]) -> T:
    __tracebackhide__ = True
    try:
        return call()
    except Exception as error:  # noqa: BLE001  reported as the test's failure
        text = "a key" if any(isinstance(each, bytes) for each in error.args) else str(error)[:80]
        pytest.fail(f"{what} raised {type(error).__name__} ({text}): a policy that raises breaks the request")
