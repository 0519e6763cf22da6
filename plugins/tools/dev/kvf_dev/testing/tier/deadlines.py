"""Tests of deadlines: a call after its deadline does nothing, and a call in progress ends in time."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import pytest

from kvf_dev.testing.tier.kit import DELETED, EVERY_CALL, MISSING, TierKit
from kvframework.api.tier import Tier
from kvframework.errors import TierError

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

    @pytest.mark.parametrize("name", EVERY_CALL)
    def test_a_passed_deadline_fails_at_once(self, watched: Tier, name: str) -> None:
        (key,) = self.fresh_keys(1)
        self.store(watched, key, b"value")
        past = time.monotonic() - 1.0
        self.must_raise(name, self.every_call(watched, key, lambda: past)[name], "the deadline has passed")
        # In another thread: what the late call may have left locked is not this thread's there.
        self.in_threads(lambda: self.must_load(watched, key, b"value", "the late call changed it"))
        self.in_threads(lambda: self.store(watched, key, b"again"))
        self.must_load(watched, key, b"again")

    @pytest.mark.parametrize("seconds", [0.001, 0.05])
    @pytest.mark.parametrize("name", ["put", "get_into", "contains", "delete"])
    def test_a_short_deadline_ends_a_big_batch(self, watched: Tier, name: str, seconds: float) -> None:
        """The deadline is that of the batch, not of each key."""
        value = os.urandom(32 << 10)
        keys = self.fresh_keys(1000)
        parts = [[memoryview(value if name == "put" else bytearray(value))]] * len(keys)
        deadline = time.monotonic() + seconds
        with contextlib.suppress(TierError):
            if name in ("put", "get_into"):
                getattr(watched, name)(keys, parts, deadline=deadline)
            else:
                getattr(watched, name)(keys, deadline=deadline)
        late = time.monotonic() - deadline
        assert late < self.grace_s, f"{name} went on for {late:.1f} s after its deadline"

        some = keys[:: len(keys) // 20]
        buffers = [bytearray(len(value)) for _ in some]
        outcomes = watched.get_into(some, self.parts_of(buffers), deadline=self.soon())
        assert set(outcomes) <= {len(value), MISSING}, "a value of a batch that ended early is there in part"
        for buffer, outcome in zip(buffers, outcomes, strict=True):
            if outcome is not MISSING:
                self.must_be([buffer], [value], "a value of a batch that ended early is there in part")
        assert set(watched.delete(keys, deadline=self.soon())) <= {DELETED, MISSING}

    def test_a_put_waits_for_no_other_beyond_its_deadline(self, watched: Tier) -> None:
        keys = self.fresh_keys(2)
        (other,) = self.fresh_keys(1)
        parts = self.parts_of([b"value", b"value"])
        held = Held(parts, SHORT_S + self.grace_s + 0.5)

        def put_much() -> None:
            try:
                watched.put(keys, held, deadline=self.soon())
            finally:
                held.reached.set()  # for a tier that does not iterate over the list

        def put_meanwhile() -> None:
            held.reached.wait(self.patience_s)
            started = time.monotonic()
            try:
                with contextlib.suppress(TierError):
                    watched.put([other], parts[:1], deadline=started + SHORT_S)
                took = time.monotonic() - started
            finally:
                held.go.set()
            assert took < SHORT_S + self.grace_s, "put waited for another put beyond its deadline"

        self.in_threads(put_much, put_meanwhile)
        self.must_load(watched, keys[1], b"value")
        assert set(watched.delete([*keys, other], deadline=self.soon())) <= {DELETED, MISSING}

    def test_a_late_call_does_not_disturb_the_next(self, watched: Tier) -> None:
        keys = self.fresh_keys(50)
        values = [b"%03d" % index * 3000 for index in range(len(keys))]
        watched.put(keys, self.parts_of(values), deadline=self.soon())
        other = [b"%03d" % index * 3000 for index in range(len(keys))]
        for step in range(20):
            buffers = [bytearray(len(value)) for value in values]
            with contextlib.suppress(TierError):
                watched.get_into(keys, self.parts_of(buffers), deadline=time.monotonic() + max(step - 12, 0) / 5000)
            self.must_load(watched, keys[step], values[step], "the answer of a late call, or none")
            with contextlib.suppress(TierError):
                watched.put(keys, self.parts_of(other), deadline=time.monotonic() + max(step - 12, 0) / 5000)
            self.in_threads(lambda step=step: self.store(watched, keys[step], values[step]))  # type: ignore[misc]
            self.must_load(watched, keys[step], values[step], "a late put went on after it had ended")
