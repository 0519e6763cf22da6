"""Owns what the author of an eviction policy gives to the kit, and the words that its tests are written in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import ClassVar

import pytest

from kvframework.api import PACKED_KEY_BYTES, EvictionPolicy, EvictionProvider, PackedKey
from kvframework.testing.making import NamedKit

MakePolicy = Callable[[], EvictionPolicy]

MIB = 1 << 20


class EvictionKit(NamedKit):
    """What an author may give. Required is either `use` or a `make_policy` fixture."""

    descriptor = EvictionProvider

    examples: ClassVar[int] = 60
    """How many sequences of calls are compared with a set."""

    remembered_keys: ClassVar[int] = 4096
    """How many keys that left L1 the policy may remember, however few are in."""

    @pytest.fixture
    def make_policy(self) -> MakePolicy:
        """Makes policies that know of nothing yet."""
        return self.by_name()

    @pytest.fixture
    def policy(self, make_policy: MakePolicy) -> EvictionPolicy:
        return make_policy()


def fresh_keys(count: int) -> list[PackedKey]:
    return [os.urandom(PACKED_KEY_BYTES) for _ in range(count)]


def insert(policy: EvictionPolicy, keys: Iterable[PackedKey], nbytes: int = MIB) -> None:
    for key in keys:
        policy.on_insert(key, nbytes)


def must_offer(policy: EvictionPolicy, keys: Iterable[PackedKey]) -> None:
    """Fails unless all of `keys` are offered, each once, and nothing else."""
    offered, wanted = list(policy.victims()), set(keys)
    assert len(offered) == len(set(offered)), "a key is offered twice"
    assert not set(offered) - wanted, "a key is offered that is not in"
    assert not wanted - set(offered), "a key that is in is not offered"
