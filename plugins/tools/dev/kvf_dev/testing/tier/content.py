"""The values that the tests of faults write and read: each follows from its key, as with the core's keys."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvframework.api.keys import PackedKey
from kvframework.errors import TierError
from kvframework.storage.l2.sealed_tier import L2Store
from kvframework.storage.l2.steps import run

T = TypeVar("T")

_LENGTHS = (1, 40, 5000, 70_000, 300_000)


def value_of(key: PackedKey) -> bytes:
    """Return the only correct value of this key."""
    return hashlib.shake_128(key).digest(_LENGTHS[key[-1] % len(_LENGTHS)])


def save(store: L2Store, keys: Sequence[PackedKey]) -> None:
    """Put the values of `keys`."""
    run(store.put_steps(keys, [memoryview(value_of(key)) for key in keys]))


def load(store: L2Store, keys: Sequence[PackedKey]) -> list[bool]:
    """Return which of `keys` were found; fails if one came back with wrong bytes."""
    # Random, so that bytes that were never read are not right by chance.
    buffers = [bytearray(os.urandom(len(value_of(key)))) for key in keys]
    found = run(store.get_steps(keys, [memoryview(buffer) for buffer in buffers]))
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
