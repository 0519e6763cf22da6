"""Tests of deadlines: a call after its deadline does nothing, and a call in progress ends in time."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import pytest

from kvframework.api.tier import Tier
from kvframework.errors import TierError
from kvframework.testing.tier.kit import DELETED, MISSING, TierKit

_T = TypeVar("_T")

SHORT_S = 0.05


class Held(list[_T]):
    """A list whose iteration pauses before the second item until `go` is set, for at most `within_s` seconds."""

    def __init__(self, items: Sequence[_T], within_s: float) -> None:
        super().__init__(items)
        self.reached, self.go = threading.Event(), threading.Event()
        self._within_s = within_s

    def __iter__(self) -> Iterator[_T]:
        for index in range(len(self)):
            if index == 1:
                self.reached.set()
                self.go.wait(self._within_s)
            yield self[index]


class DeadlineTests(TierKit):
    """An operation that exceeds its deadline raises `TierError`; the tier stays usable."""

    @pytest.mark.parametrize("name", ["contains", "get_into", "put", "delete", "ping"])
    def test_a_passed_deadline_fails_at_once(self, tier: Tier, name: str) -> None:
        (key,) = self.fresh_keys(1)
        self.store(tier, key, b"value")
        started, past = time.monotonic(), time.monotonic() - 1.0
        calls = self.calls(tier, key, lambda: past) | {"ping": lambda: tier.ping(deadline=past)}
        self.must_raise(name, calls[name], "the deadline has passed")
        assert time.monotonic() - started < self.grace_s
        self.must_load(tier, key, b"value")

    @pytest.mark.parametrize("seconds", [0.001, 0.05])
    def test_a_short_deadline_ends_a_big_batch(self, tier: Tier, seconds: float) -> None:
        value = os.urandom(32 << 10)
        keys = self.fresh_keys(1000)
        started = time.monotonic()
        with contextlib.suppress(TierError):
            tier.put(keys, [[memoryview(value)]] * len(keys), deadline=started + seconds)
        assert time.monotonic() - started < seconds + self.grace_s, "put went on after its deadline"

        some = keys[:: len(keys) // 20]
        buffers = [bytearray(len(value)) for _ in some]
        outcomes = tier.get_into(some, self.parts_of(buffers), deadline=self.soon())
        assert set(outcomes) <= {len(value), MISSING}
        assert all(buffer == value for buffer, each in zip(buffers, outcomes, strict=True) if each is not MISSING)

        target = bytearray(len(value))
        started = time.monotonic()
        with contextlib.suppress(TierError):
            tier.get_into(keys, [[memoryview(target)]] * len(keys), deadline=started + seconds)
        assert time.monotonic() - started < seconds + self.grace_s, "get_into went on after its deadline"
        assert set(tier.delete(keys, deadline=self.soon())) <= {DELETED, MISSING}

    def test_a_put_waits_for_no_other_beyond_its_deadline(self, tier: Tier) -> None:
        keys = self.fresh_keys(2)
        (other,) = self.fresh_keys(1)
        parts = self.parts_of([b"value", b"value"])
        held = Held(parts, SHORT_S + self.grace_s + 0.5)

        def put_much() -> None:
            try:
                tier.put(keys, held, deadline=self.soon())
            finally:
                held.reached.set()  # for a tier that does not iterate over the list

        def put_meanwhile() -> None:
            held.reached.wait(self.patience_s)
            started = time.monotonic()
            try:
                with contextlib.suppress(TierError):
                    tier.put([other], parts[:1], deadline=started + SHORT_S)
                took = time.monotonic() - started
            finally:
                held.go.set()
            assert took < SHORT_S + self.grace_s, "put waited for another put beyond its deadline"

        self.in_threads(put_much, put_meanwhile)
        self.must_load(tier, keys[1], b"value")
        assert set(tier.delete([*keys, other], deadline=self.soon())) <= {DELETED, MISSING}

    def test_a_late_call_does_not_disturb_the_next(self, tier: Tier) -> None:
        keys = self.fresh_keys(50)
        values = [b"%03d" % index * 3000 for index in range(len(keys))]
        tier.put(keys, self.parts_of(values), deadline=self.soon())
        for step in range(10):
            buffers = [bytearray(len(value)) for value in values]
            with contextlib.suppress(TierError):
                tier.get_into(keys, self.parts_of(buffers), deadline=time.monotonic() + step / 5000)
            self.must_load(tier, keys[step], values[step])
