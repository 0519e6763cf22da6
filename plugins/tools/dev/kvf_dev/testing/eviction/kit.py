"""The settings and fixtures that the author of an eviction policy gives to the kit, and functions its tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import ClassVar

import pytest

from kvf_dev.testing.eviction.watched import WatchedPolicy
from kvf_dev.testing.making import NamedKit
from kvframework.api.eviction import EvictionPolicy, EvictionProvider, PackedKey
from kvframework.api.keys import PACKED_KEY_BYTES

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
