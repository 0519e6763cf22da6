"""Owns one attached L2 tier: deadlines, circuit breaker, envelope and counters around a `Tier` plugin.

Called from the storage threads (write-back, prefetch), never from the serving thread; every call blocks for at most the
tier's timeout.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvframework.api import Outcome, PackedKey, Tier
from kvframework.errors import TierError
from kvframework.storage.breaker import Breaker
from kvframework.storage.envelope import HEADER_BYTES, defect, seal

log = logging.getLogger(__name__)
R = TypeVar("R")


class L2Store:
    """A tier as the controllers see it. Thread-safe. Raises `TierError` when the tier is down, its circuit is open, or
    it is closed."""

    def __init__(self, tier: Tier, *, timeout_s: float, write_queue: int, breaker: Breaker | None = None) -> None:
        self.name = tier.name
        self.timeout_s = timeout_s
        self.write_queue = write_queue
        self.counters: Counter[str] = Counter()
        self.last_error = ""
        self._tier = tier
        self._breaker = breaker or Breaker()
        self._closed = False
        self._lock = threading.Lock()

    @property
    def state(self) -> str:
        return self._breaker.state

    def wait_s(self) -> float:
        """Seconds until the circuit lets a call through."""
        with self._lock:
            return self._breaker.wait_s(time.monotonic())

    def count(self, **amounts: int) -> None:
        """Adds to the counters that `status` shows."""
        with self._lock:
            self.counters.update(amounts)

    def contains(self, keys: Sequence[PackedKey]) -> list[bool]:
        outcomes = self._call(lambda deadline: self._tier.contains(keys, deadline=deadline), len(keys))
        return [outcome is Outcome.FOUND for outcome in outcomes]

    def get_into(self, keys: Sequence[PackedKey], ranges: Sequence[memoryview]) -> list[bool]:
        """Fills each range from the tier; True where its bytes are proven to be those that were stored.

        Received straight into the ranges, no copy. A value that is damaged, foreign or of another format is deleted
        and counted.
        """
        headers = [bytearray(HEADER_BYTES) for _ in keys]
        parts = [[memoryview(header), view] for header, view in zip(headers, ranges, strict=True)]
        outcomes = self._call(lambda deadline: self._tier.get_into(keys, parts, deadline=deadline), len(keys))
        good = []
        for key, header, view, outcome in zip(keys, headers, ranges, outcomes, strict=True):
            problem = defect(header, key, view) if outcome is Outcome.FOUND else None
            if problem or outcome is Outcome.FAILED:
                self._discard(key, problem or "another length than expected")
            good.append(outcome is Outcome.FOUND and problem is None)
        self.count(
            hits=sum(good),
            misses=len(good) - sum(good),
            bytes_read=sum(view.nbytes for view, ok in zip(ranges, good, strict=True) if ok),
        )
        return good

    def put(self, keys: Sequence[PackedKey], values: Sequence[memoryview]) -> int:
        """Stores each value behind its header, sent straight from the given memory; the number that was stored."""
        parts: list[list[memoryview]] = []
        for key, value in zip(keys, values, strict=True):
            parts.append([memoryview(seal(key, value)), value])
        outcomes = self._call(lambda deadline: self._tier.put(keys, parts, deadline=deadline), len(keys))
        sizes = [value.nbytes for value, outcome in zip(values, outcomes, strict=True) if outcome is Outcome.STORED]
        self.count(stored=len(sizes), store_failed=len(keys) - len(sizes), bytes_written=sum(sizes))
        return len(sizes)

    def delete(self, keys: Sequence[PackedKey]) -> None:
        self._call(lambda deadline: self._tier.delete(keys, deadline=deadline), len(keys))

    def close(self) -> None:
        """Refuses calls from now on and closes the tier, which ends the calls in flight. Idempotent, raises nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._tier.close()
        except Exception:
            log.exception("tier %s: closing it failed", self.name)

    def status(self) -> dict[str, object]:
        with self._lock:
            return {"name": self.name, "state": self.state, "last_error": self.last_error, **self.counters}

    def _discard(self, key: PackedKey, problem: str) -> None:
        self.count(corrupt=1)
        log.warning("tier %s: a value is unusable and is deleted: %s (key %s)", self.name, problem, key.hex())
        try:
            self.delete([key])
        except TierError:
            log.debug("tier %s: could not delete it", self.name)

    def _call(self, operation: Callable[[float], list[R]], count: int) -> list[R]:
        now = time.monotonic()
        with self._lock:
            if self._closed:
                raise TierError("the tier is closed", where=self.name)
            if not self._breaker.allow(now):
                self.counters["refused"] += 1
                raise TierError("the circuit is open after failures", where=self.name, hint=self.last_error)
        try:
            outcomes = operation(now + self.timeout_s)
            if len(outcomes) != count:
                raise TierError(f"the tier answered {len(outcomes)} outcomes for {count} keys", where=self.name)
        except Exception as error:
            with self._lock:
                self._breaker.failed(time.monotonic())
                self.counters["errors"] += 1
                self.last_error = str(error)
                level = logging.DEBUG if self._closed else logging.WARNING
            log.log(level, "tier %s: %s", self.name, error)
            if isinstance(error, TierError):
                raise
            raise TierError(f"{type(error).__name__}: {error}", where=self.name) from error
        with self._lock:
            self._breaker.succeeded()
        return outcomes
