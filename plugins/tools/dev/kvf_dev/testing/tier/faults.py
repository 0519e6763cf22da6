"""Tests of a network tier on a faulty wire. What the core does with values that are spoilt, and with a tier whose calls
fail, is no matter of a tier."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pytest

from kvf_dev.testing.faults import WIRE_FAULTS, FaultProxy
from kvf_dev.testing.kit import must_be_equal
from kvf_dev.testing.tier.kit import MISSING, TierKit
from kvf_dev.testing.tier.watched import WatchedTier, parts_of, said
from kvframework.api.tier import PackedKey, Tier
from kvframework.errors import TierError

T = TypeVar("T")

DEADLINE_S = 0.3
TURNS = 4
# More than a pool has places.
FAILURES = 25
# More than twice the connections of a pool.
BREAKS = 24


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


class WireFaultTests(TierKit):
    """Tests for tiers with a `faulty_tier` fixture: a call ends in time, and the tier recovers by itself."""

    @pytest.fixture
    def behind(self, faulty_tier: tuple[Tier, FaultProxy]) -> tuple[WatchedTier, FaultProxy]:
        return self.watch(faulty_tier[0]), faulty_tier[1]

    @pytest.mark.parametrize("kind", WIRE_FAULTS)
    def test_a_fault_on_the_wire_is_an_outcome_or_a_tier_error(
        self, behind: tuple[WatchedTier, FaultProxy], kind: str
    ) -> None:
        """A value is right or missing; afterwards it can be stored again. The core notices a flipped bit."""
        tier, proxy = behind
        chance = random.Random(23)  # noqa: S311  no secrets
        values = {key: key * (1 + 100 * index) for index, key in enumerate(self.fresh_keys(8))}
        (other,) = self.fresh_keys(1)
        tier.store_all(values)
        proxy.inject(kind)

        def get(keys: list[PackedKey], deadline: float) -> None:
            buffers = [bytearray(len(values[key])) for key in keys]
            outcomes = tier.get_into(keys, parts_of(buffers), deadline=deadline)
            for key, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
                if outcome == len(buffer) and kind != "flip":
                    must_be_equal(buffer, values[key], "get_into returned wrong bytes as a hit")

        for _ in range(1 if kind == "stall" else TURNS):
            batch = chance.sample(list(values), chance.randint(1, 5))
            self.in_time(partial(get, batch))
            self.in_time(partial(tier.put, batch, parts_of(values[key] for key in batch)))
            self.in_time(partial(tier.contains, [other]))
            self.in_time(partial(tier.delete, [other]))
        assert proxy.injected[kind], "the proxy injected no fault: connect the tier through the proxy"
        proxy.heal()
        for key, value in values.items():
            outcome, found = persist(partial(tier.load, key, len(value)), self.patience_s)
            assert outcome is MISSING or (outcome, found) == (len(value), value), "a fault left a wrong value"
        persist(partial(tier.store_all, values), self.patience_s)
        for key, value in values.items():
            self.must_be_there(tier, key, value)
        tier.ping()

    def test_what_a_stalled_wire_held_back_is_no_answer_to_the_next_call(
        self, behind: tuple[WatchedTier, FaultProxy]
    ) -> None:
        tier, proxy = behind
        one, two = self.fresh_keys(2)
        tier.store_all({one: b"one", two: b"two"})
        proxy.inject("stall")
        late = partial(tier.get_into, [one], parts_of([bytearray(3)]), deadline=time.monotonic() + 0.1)
        why = "no reply came before the deadline"
        self.in_threads(lambda: self.must_raise("get_into", late, why), within_s=self.patience_s)
        proxy.heal()
        for _ in range(10):
            self.must_be_there(tier, two, b"two")

    @pytest.mark.parametrize("name", ["contains", "get_into", "put", "delete"])
    def test_closing_ends_the_calls_that_wait_for_a_stalled_wire(
        self, behind: tuple[WatchedTier, FaultProxy], name: str
    ) -> None:
        tier, proxy = behind
        (key,) = self.fresh_keys(1)
        tier.store(key, b"value")
        proxy.inject("stall")
        far = time.monotonic() + 10 * self.patience_s
        ended = threading.Event()

        def wait() -> None:
            try:
                self.must_raise(name, lambda: self.call(tier, name, key, far), "the tier was closed during the call")
            finally:
                ended.set()

        def close() -> None:
            # Time to reach the wire; a call that comes later finds a closed tier.
            ended.wait(2 * DEADLINE_S)
            tier.close()
            in_time = ended.wait(self.grace_s)
            proxy.heal()
            assert in_time, (
                f"{name} still waits for the wire {self.grace_s:g} s after `close`, which must end calls in flight"
            )

        self.in_threads(wait, close, within_s=self.patience_s + self.grace_s)

    def test_failures_use_nothing_up(self, behind: tuple[WatchedTier, FaultProxy]) -> None:
        """Descriptors, connections and places in a pool must not be used up."""
        tier, proxy = behind
        (key,) = self.fresh_keys(1)
        tier.store(key, b"value")

        def fail(kind: str, times: int) -> int:
            """Return how many descriptors there are afterwards."""
            proxy.inject(kind)
            for _ in range(times):
                with contextlib.suppress(TierError):
                    tier.get_into([key], parts_of([bytearray(5)]), deadline=time.monotonic() + DEADLINE_S)
            proxy.heal()
            self.must_be_there(tier, key, b"value")
            return len(os.listdir("/proc/self/fd"))

        one_by_one = [fail("reset", 1) for _ in range(BREAKS)]
        # A few more may be those of a pool that grows to its size.
        grown = one_by_one[-1] - min(one_by_one[:2])
        assert grown <= BREAKS // 2, f"the tier keeps {grown} descriptors of {BREAKS} broken connections"
        many = [fail(kind, FAILURES) for kind in ("reset", "refuse", "reset", "refuse")]
        grown = many[-1] - many[0]
        assert grown < FAILURES, f"the tier keeps {grown} descriptors after {3 * FAILURES} failures"

    def must_be_there(self, tier: WatchedTier, key: PackedKey, value: bytes) -> None:
        """Fail unless the value is found after a fault, with patience for `TierError`."""
        received, found = persist(lambda: tier.load(key, len(value)), self.patience_s)
        assert received == len(value), f"after the fault get_into returned {said(received)}, not {len(value)} bytes"
        must_be_equal(found, value, "get_into returned wrong bytes after a fault on the wire")

    def in_time(self, call: Callable[..., object]) -> None:
        """Make a call, which may raise `TierError`; fail if it takes much longer than `DEADLINE_S`."""

        def ask() -> None:
            with contextlib.suppress(TierError):
                call(deadline=time.monotonic() + DEADLINE_S)

        self.in_threads(ask, within_s=DEADLINE_S + self.grace_s)
