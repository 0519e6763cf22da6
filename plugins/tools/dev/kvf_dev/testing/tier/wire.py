"""Tests of a network tier on a faulty wire: slow, cut, flipped, refused, stalled, reset."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

import pytest

from kvf_dev.testing.faults import WIRE_FAULTS, FaultProxy
from kvf_dev.testing.tier.faults import exercise, load, must_heal, persist, save
from kvf_dev.testing.tier.kit import TierKit
from kvf_dev.testing.tier.watched import due, said
from kvframework.api.tier import Outcome, Tier
from kvframework.errors import TierError
from kvframework.storage.l2.sealed_tier import L2Store
from kvframework.storage.l2.tier_calls import Breaker

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

    def test_connections_that_break_are_closed(self, faulty_tier: tuple[Tier, FaultProxy]) -> None:
        """Each failure is that of a connection that worked before: its descriptor must not stay."""
        tier, proxy = self.watch(faulty_tier[0]), faulty_tier[1]
        (key,) = self.fresh_keys(1)
        self.store(tier, key, b"value")
        descriptors = []
        for _ in range(BREAKS):
            proxy.inject("reset")
            with contextlib.suppress(TierError):
                tier.get_into([key], self.parts_of([bytearray(5)]), deadline=time.monotonic() + DEADLINE_S)
            proxy.heal()
            self.must_be_there(tier, key, b"value")
            descriptors.append(len(os.listdir("/proc/self/fd")))
        # A few more may be those of a pool that grows to its size.
        grown = descriptors[-1] - min(descriptors[:2])
        assert grown <= BREAKS // 2, f"{grown} descriptors more after {BREAKS} connections that broke: close each"

    def test_failures_use_nothing_up(self, faulty_tier: tuple[Tier, FaultProxy]) -> None:
        """After many failures there are as many connections, places in a pool and descriptors as after some."""
        tier, proxy = self.watch(faulty_tier[0]), faulty_tier[1]
        (key,) = self.fresh_keys(1)
        self.store(tier, key, b"value")
        descriptors = []
        for kind in ("reset", "refuse", "reset", "refuse"):
            proxy.inject(kind)
            for _ in range(FAILURES):
                with contextlib.suppress(TierError):
                    tier.get_into([key], self.parts_of([bytearray(5)]), deadline=time.monotonic() + DEADLINE_S)
            proxy.heal()
            self.must_be_there(tier, key, b"value")
            descriptors.append(len(os.listdir("/proc/self/fd")))
        grown = descriptors[-1] - descriptors[0]
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
