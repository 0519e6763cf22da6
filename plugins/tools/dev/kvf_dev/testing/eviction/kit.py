"""The settings and fixtures that the author of an eviction policy gives to the kit, and what its tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

import pytest

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
        """An empty policy."""
        return make_policy()


def fresh_keys(count: int) -> list[PackedKey]:
    return [os.urandom(PACKED_KEY_BYTES) for _ in range(count)]


def insert(policy: EvictionPolicy, keys: Iterable[PackedKey], nbytes: int = MIB) -> None:
    for key in keys:
        policy.on_insert(key, nbytes)


def must_offer(policy: EvictionPolicy, keys: Iterable[PackedKey]) -> list[PackedKey]:
    """Fail unless the policy offers each of `keys` exactly once and nothing else; return them in its order."""
    wanted, offered = set(keys), dict[PackedKey, None]()
    for key in walk(policy):
        # Not all at once: a walk may have no end.
        assert key not in offered, "a key is offered twice"
        assert key in wanted, "a key is offered that is not in"
        offered[key] = None
    missing = len(wanted) - len(offered)
    assert not missing, f"a key that is in is not offered: {missing} of {len(wanted)}"
    return list(offered)


def walk(policy: EvictionPolicy) -> Iterator[PackedKey]:
    """Yield the victims; fail if one is no key."""
    victims = policy.victims()
    assert isinstance(victims, Iterator), f"victims answered a {type(victims).__name__}, no iterator"
    for key in victims:
        assert isinstance(key, bytes), f"victims offered a {type(key).__name__}, no key"
        yield key
