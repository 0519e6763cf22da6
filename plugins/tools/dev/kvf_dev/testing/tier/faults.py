"""Tests of a tier whose calls and values fail, behind the store that the server puts around every tier, and of a
network tier on a faulty wire. Each value follows from its key, as with the core's keys."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

from kvf_dev.testing.faults import TIER_FAULTS, WIRE_FAULTS, FaultProxy, FaultyTier
from kvf_dev.testing.tier.kit import TierKit
from kvf_dev.testing.tier.watched import due, said
from kvframework.api.keys import PackedKey
from kvframework.api.tier import Outcome, Tier
from kvframework.errors import TierError
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


DEADLINE_S = 0.3
TURNS = 12
# More than a pool has places.
FAILURES = 25
# More than twice the connections of a pool.
BREAKS = 24


class WireFaultTests(TierKit):
    """Tests for tiers that come with a `faulty_tier` fixture. During the fault a call ends in time, with outcomes or
    `TierError`; afterwards the tier recovers by itself.
    """

    @pytest.mark.parametrize("kind", WIRE_FAULTS)
    def test_a_fault_on_the_wire_is_an_outcome_or_a_tier_error(
        self, faulty_tier: tuple[Tier, FaultProxy], kind: str
    ) -> None:
        tier, proxy = self.watch(faulty_tier[0]), faulty_tier[1]
        known, other = self.fresh_keys(2)
        value = b"value" * 2000
        self.store(tier, known, value)
        proxy.inject(kind)
        for _ in range(1 if kind == "stall" else 3):
            for name, call in self.calls(tier, other, lambda: time.monotonic() + DEADLINE_S).items():
                self.in_time(name, call)
            buffer = bytearray(len(value))
            self.in_time(
                "get_into",
                lambda buffer=buffer: tier.get_into(  # type: ignore[misc]
                    [known], self.parts_of([buffer]), deadline=time.monotonic() + DEADLINE_S
                ),
            )
        assert proxy.injected[kind], "the fault did not take place: does the tier talk through the proxy?"
        proxy.heal()
        self.must_be_there(tier, known, value)
        tier.ping(deadline=self.soon())

    @pytest.mark.parametrize("kind", WIRE_FAULTS)
    def test_no_wrong_byte_passes_a_faulty_wire(self, faulty_tier: tuple[Tier, FaultProxy], kind: str) -> None:
        tier, proxy = self.watch(faulty_tier[0]), faulty_tier[1]
        breaker = Breaker(backoff_s=0.001, max_backoff_s=0.01)
        store = L2Store(tier, timeout_s=DEADLINE_S * (2 if kind == "slow" else 1), breaker=breaker)
        keys = self.fresh_keys(8)
        persist(lambda: save(store, keys), self.patience_s)
        assert all(persist(lambda: load(store, keys), self.patience_s)), "a value that was stored is not there"
        proxy.inject(kind)
        self.in_threads(lambda: exercise(store, keys, 23, TURNS // 4 if kind == "stall" else TURNS))
        assert proxy.injected[kind], "the fault did not take place: does the tier talk through the proxy?"
        proxy.heal()
        must_heal(store, keys, self.patience_s)

    def test_what_a_stalled_wire_held_back_is_no_answer_to_the_next_call(
        self, faulty_tier: tuple[Tier, FaultProxy]
    ) -> None:
        tier, proxy = self.watch(faulty_tier[0]), faulty_tier[1]
        one, two = self.fresh_keys(2)
        self.store(tier, one, b"one")
        self.store(tier, two, b"two")
        proxy.inject("stall")
        buffer = bytearray(3)
        late = lambda: tier.get_into([one], self.parts_of([buffer]), deadline=time.monotonic() + 0.1)  # noqa: E731
        why = "nothing came before the deadline"
        self.in_threads(lambda: self.must_raise("get_into", late, why), within_s=self.patience_s)
        proxy.heal()
        for _ in range(10):
            self.must_be_there(tier, two, b"two")

    @pytest.mark.parametrize("name", ["contains", "get_into", "put", "delete"])
    def test_closing_ends_the_calls_that_wait_for_a_stalled_wire(
        self, faulty_tier: tuple[Tier, FaultProxy], name: str
    ) -> None:
        tier, proxy = self.watch(faulty_tier[0]), faulty_tier[1]
        (key,) = self.fresh_keys(1)
        self.store(tier, key, b"value")
        proxy.inject("stall")
        far = time.monotonic() + 10 * self.patience_s
        ended = threading.Event()

        def wait() -> None:
            try:
                self.must_raise(name, self.calls(tier, key, lambda: far)[name], "the tier was closed meanwhile")
            finally:
                ended.set()

        def close() -> None:
            # Time to reach the wire; a call that comes later finds a closed tier.
            ended.wait(2 * DEADLINE_S)
            tier.close()
            in_time = ended.wait(self.grace_s)
            proxy.heal()
            assert in_time, (
                f"{name} still waits for the wire {self.grace_s:g} s after `close`: close ends calls in flight"
            )

        self.in_threads(wait, close, within_s=self.patience_s + self.grace_s)

    def test_failures_use_nothing_up(self, faulty_tier: tuple[Tier, FaultProxy]) -> None:
        """Each failure is that of a connection that worked before, then there are many: descriptors, connections and
        places in a pool must not be used up."""
        tier, proxy = self.watch(faulty_tier[0]), faulty_tier[1]
        (key,) = self.fresh_keys(1)
        self.store(tier, key, b"value")

        def fail(kind: str, times: int) -> int:
            """Return how many descriptors there are afterwards."""
            proxy.inject(kind)
            for _ in range(times):
                with contextlib.suppress(TierError):
                    tier.get_into([key], self.parts_of([bytearray(5)]), deadline=time.monotonic() + DEADLINE_S)
            proxy.heal()
            self.must_be_there(tier, key, b"value")
            return len(os.listdir("/proc/self/fd"))

        one_by_one = [fail("reset", 1) for _ in range(BREAKS)]
        # A few more may be those of a pool that grows to its size.
        grown = one_by_one[-1] - min(one_by_one[:2])
        assert grown <= BREAKS // 2, f"{grown} descriptors more after {BREAKS} connections that broke: close each"
        many = [fail(kind, FAILURES) for kind in ("reset", "refuse", "reset", "refuse")]
        grown = many[-1] - many[0]
        assert grown < FAILURES, f"{grown} descriptors more after {3 * FAILURES} more failures"

    def must_be_there(self, tier: Tier, key: bytes, value: bytes) -> None:
        """Fail unless the value is found after a fault, with patience for `TierError`."""
        received, found = persist(lambda: self.load(tier, key, len(value)), self.patience_s)
        assert received == len(value), f"after the fault get_into answered {said(received)}; {due(len(value))}"
        self.must_be([found], [value], "wrong bytes after a fault on the wire")

    def in_time(self, name: str, call: Callable[[], object]) -> None:
        """Fail if `call` takes much longer than `DEADLINE_S`, or ends in anything but one outcome or `TierError`."""
        answers: list[object] = []

        def ask() -> None:
            try:
                answers.append(call())
            except TierError:
                answers.append([Outcome.FAILED])

        self.in_threads(ask, within_s=DEADLINE_S + self.grace_s)
        (outcomes,) = answers
        assert isinstance(outcomes, list), f"{name} answered {outcomes!r}"
        assert len(outcomes) == 1, f"{name} gave {len(outcomes)} outcomes for one key"
        assert isinstance(outcomes[0], int | Outcome), f"{name} answered {outcomes!r}"
