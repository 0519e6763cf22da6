"""Tests of a tier's end, and of the values that outlive it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

import pytest

from kvf_dev.testing.tier.kit import EVERY_CALL, TierKit
from kvframework.api.tier import Outcome, Tier
from kvframework.errors import TierError


class LifecycleTests(TierKit):
    """`close` is idempotent, and calls in flight fail with `TierError`."""

    @pytest.mark.parametrize("name", EVERY_CALL)
    def test_a_closed_tier_fails_every_call(self, watched: Tier, name: str) -> None:
        (key,) = self.fresh_keys(1)
        self.store(watched, key, b"value")
        watched.close()
        self.must_raise(name, self.every_call(watched, key, self.soon)[name], "the tier is closed")

    def test_a_tier_that_did_nothing_closes(self, watched: Tier) -> None:
        watched.close()

    def test_closing_twice_is_closing_once(self, watched: Tier) -> None:
        (key,) = self.fresh_keys(1)
        self.store(watched, key, b"value")
        watched.close()
        watched.close()
        self.in_threads(watched.close, watched.close)

    def test_closing_at_the_same_time_is_closing_once(self, watched: Tier) -> None:
        (key,) = self.fresh_keys(1)
        self.store(watched, key, b"value")
        self.in_threads(watched.close, watched.close, watched.close)
        self.must_raise("contains", lambda: watched.contains([key], deadline=self.soon()), "the tier is closed")

    def test_closing_ends_the_calls_in_flight(self, watched: Tier) -> None:
        keys, value = self.fresh_keys(20), os.urandom(100_000)
        self.store(watched, keys[0], value)
        begun = threading.Semaphore(0)
        ended: list[float] = []

        def work(put: bool) -> None:
            give_up = self.soon()
            buffers = [bytearray(len(value)) for _ in keys]
            while time.monotonic() < give_up:
                outcomes: Sequence[int | Outcome]
                try:
                    if put:
                        outcomes = watched.put(keys, [[memoryview(value)]] * len(keys), deadline=self.soon())
                    else:
                        outcomes = watched.get_into(keys, self.parts_of(buffers), deadline=self.soon())
                except TierError:
                    break
                finally:
                    begun.release()
                wrong = [outcome for outcome in outcomes if not isinstance(outcome, int | Outcome)]
                assert not wrong, f"an outcome is a {type(wrong[0]).__name__} while the tier closes"
            ended.append(time.monotonic())

        def close() -> None:
            for _ in range(8):
                assert begun.acquire(timeout=self.patience_s), "calls of four threads do not end: none gets its turn"
            closed = time.monotonic()
            watched.close()
            assert time.monotonic() - closed < self.grace_s, "close took too long"
            ended.append(closed)

        self.in_threads(close, *(lambda put=put: work(put) for put in (True, False, True, False)))
        assert max(ended) - min(ended) < self.grace_s, "a call went on after the tier was closed"

    def test_values_outlive_the_tier(self, watched: Tier) -> None:
        if not self.persistent:
            pytest.skip("persistent = False")
        keys = self.fresh_keys(4)
        values = [b"", b"1", os.urandom(5000), os.urandom(1 << 20)]
        for key, value in zip(keys, values, strict=True):
            self.store(watched, key, value)
        gone = keys.pop(1)
        values.pop(1)
        watched.delete([gone], deadline=self.soon())
        watched.close()
        again = self.another(watched)
        for key, value in zip(keys, values, strict=True):
            self.must_load(again, key, value)
        assert again.contains([gone], deadline=self.soon()) == [Outcome.MISSING]
        self.store(again, gone, b"a value of the next life")
        again.close()
        self.must_load(self.another(watched), gone, b"a value of the next life")
