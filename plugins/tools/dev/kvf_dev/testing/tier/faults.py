"""Tests of a tier whose calls and values fail, behind the store that the server puts around every tier; each value
follows from its key, as with the core's keys."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

from kvf_dev.testing.faults import TIER_FAULTS, FaultyTier
from kvf_dev.testing.tier.kit import TierKit
from kvframework.api.keys import PackedKey
from kvframework.api.tier import Tier
from kvframework.errors import TierError
from kvframework.storage.envelope import HEADER_BYTES
from kvframework.storage.l2.sealed_tier import L2Store
from kvframework.storage.l2.tier_calls import Breaker

T = TypeVar("T")
_LENGTHS = (1, 40, 5000, 70_000, 300_000)


def value_of(key: PackedKey) -> bytes:
    """Return the only correct value of this key."""
    return hashlib.shake_128(key).digest(_LENGTHS[key[-1] % len(_LENGTHS)])


def save(store: L2Store, keys: Sequence[PackedKey]) -> None:
    """Put the values of `keys`."""
    store.put(keys, [memoryview(value_of(key)) for key in keys])


def load(store: L2Store, keys: Sequence[PackedKey]) -> list[bool]:
    """Return which of `keys` were found; fails if one came back with wrong bytes."""
    # Random, so that bytes that were never read are not right by chance.
    buffers = [bytearray(os.urandom(len(value_of(key)))) for key in keys]
    found = store.get(keys, [memoryview(buffer) for buffer in buffers])
    for key, buffer, good in zip(keys, buffers, found, strict=True):
        assert not good or buffer == value_of(key), "wrong bytes came back as if they were right"
    return found


def exercise(store: L2Store, keys: Sequence[PackedKey], seed: int, turns: int) -> None:
    """Save and load batches of `keys` in random order; refused calls are ignored."""
    choice = random.Random(seed)  # noqa: S311  no secrets
    for _ in range(turns):
        batch = choice.sample(keys, choice.randint(1, min(5, len(keys))))
        try:
            if choice.random() < 0.4:
                save(store, batch)
            else:
                load(store, batch)
        except TierError:
            time.sleep(0.001)  # the circuit is open for some milliseconds


def must_heal(store: L2Store, keys: Sequence[PackedKey], patience_s: float) -> None:
    """After the faults, every value is right or missing, and every value can be stored and loaded."""
    persist(lambda: load(store, keys), patience_s)
    persist(lambda: save(store, keys), patience_s)
    found = persist(lambda: load(store, keys), patience_s)
    assert all(found), (
        f"{len(found) - sum(found)} of {len(found)} values that were stored without faults are not there: a put, or a"
        " `usage` of which the core takes the store for full"
    )


def persist(call: Callable[[], T], patience_s: float) -> T:
    """Call `call` until it raises no `TierError`, and return its result; raises the last one after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return call()
        except TierError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.005)


TURNS = 60


class FaultTests(TierKit):
    """The faults are injected around the tier, so they need no support from it. No wrong byte leaves the store, and
    once the faults stop, every key works again.
    """

    @pytest.mark.parametrize("kinds", [*((kind,) for kind in TIER_FAULTS), tuple(TIER_FAULTS)], ids="+".join)
    def test_no_wrong_byte_leaves_and_all_heals(self, watched: Tier, kinds: tuple[str, ...]) -> None:
        faulty = FaultyTier(watched, 7, kinds)
        store = L2Store(faulty, timeout_s=self.patience_s, breaker=Breaker(backoff_s=0.001, max_backoff_s=0.01))
        keys = self.fresh_keys(12)
        exercise(store, keys, 11, TURNS)
        assert all(faulty.injected[kind] for kind in kinds), f"too few faults: {dict(faulty.injected)}"
        faulty.stop()
        must_heal(store, keys, self.patience_s)

    def test_a_value_that_was_spoilt_in_the_store_leaves_it(self, watched: Tier) -> None:
        faulty = FaultyTier(watched, 13, ("flip",), rate=1.0)
        store = L2Store(faulty, timeout_s=self.patience_s)
        keys = self.fresh_keys(6)
        save(store, keys)
        faulty.stop()
        assert not any(load(store, keys)), "a value that was spoilt in the store is loaded"
        assert store.contains(keys) == [False] * len(keys), "a spoilt value could not be deleted"
        must_heal(store, keys, self.patience_s)

    @pytest.mark.parametrize("kept", [0.0, 0.5, 0.999])
    def test_a_truncated_value_is_damage_even_where_its_own_bytes_lay_before(self, watched: Tier, kept: float) -> None:
        """A place of L1 may have held the same object before: bytes that were not received are then there already."""
        store = L2Store(watched, timeout_s=self.patience_s)
        keys = self.fresh_keys(6)
        save(store, keys)
        for key in keys:
            whole = bytearray(HEADER_BYTES + len(value_of(key)))
            assert watched.get_into([key], [[memoryview(whole)]], deadline=self.soon()) == [len(whole)]
            self.store(watched, key, bytes(whole[: int(kept * len(whole))]))
        places = [bytearray(value_of(key)) for key in keys]
        found = store.get(keys, [memoryview(place) for place in places])
        assert not any(found), (
            f"{sum(found)} of {len(keys)} values that were cut pass for whole: get_into answers the bytes that it"
            " received, never those that were expected"
        )
        damaged = store.counters["corrupt"]
        assert damaged == len(keys), (
            f"{len(keys) - damaged} of {len(keys)} values that were cut to {kept:.1%} are missing, no damage: a short"
            " value, and an empty one, is a value"
        )
        must_heal(store, keys, self.patience_s)

    def test_a_refusing_tier_is_asked_again(self, watched: Tier) -> None:
        faulty = FaultyTier(watched, 17, ("refused",), rate=1.0)
        store = L2Store(faulty, timeout_s=self.patience_s, breaker=Breaker(backoff_s=0.001, max_backoff_s=0.01))
        keys = self.fresh_keys(3)
        exercise(store, keys, 19, 10)
        faulty.stop()
        persist(lambda: save(store, keys), self.patience_s)
        found = persist(lambda: load(store, keys), self.patience_s)
        assert all(found), f"{len(found) - sum(found)} of {len(found)} values are missing once the tier refuses no more"
