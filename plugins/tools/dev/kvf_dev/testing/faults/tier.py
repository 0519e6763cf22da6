"""`FaultyTier`: a wrapper of any tier with faults that follow from a seed. Runs in the caller's threads."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import TypeVar

from kvframework.api.tier import Outcome, PackedKey, Tier, TierEntry, TierUsage
from kvframework.errors import TierError

TIER_FAULTS = {
    "slow": "a call takes some milliseconds longer",
    "short": "a value is read only in part, over what the buffer held before, or is stored in part as if whole",
    "flip": "one bit of a value is another when it is read, or when it is stored",
    "refused": "a call raises TierError and does nothing",
    "lost": "a value is said to be stored and is not, or said to be missing and is there",
}

R = TypeVar("R", bound="int | Outcome")
Parts = Sequence[Sequence[memoryview]]


class FaultyTier(Tier):
    """The tier `inner`, whose calls and values meet each of `kinds` with probability `rate`. Thread-safe if `inner` is.

    `stop` ends the faults; `injected` counts by kind the faults that took place. With the same seed and the same calls,
    made in one thread, the faults are the same. `close` closes `inner`.
    """

    def __init__(
        self,
        inner: Tier,
        seed: int,
        kinds: Collection[str] = tuple(TIER_FAULTS),
        *,
        rate: float = 0.2,
        slow_s: float = 0.005,
    ) -> None:
        unknown = sorted(set(kinds) - TIER_FAULTS.keys())
        if unknown:
            raise ValueError(f"no such fault: {', '.join(unknown)}; there are {', '.join(TIER_FAULTS)}")
        self.name = inner.name
        self.injected: Counter[str] = Counter()
        self._inner = inner
        self._kinds = frozenset(kinds)
        self._rate = rate
        self._slow_s = slow_s
        self._random = random.Random(seed)  # noqa: S311  faults, no secrets
        self._lock = threading.Lock()

    def stop(self) -> None:
        """End the faults: later calls reach `inner` unchanged. Values that were stored wrongly stay so."""
        self._kinds = frozenset()

    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        self._call()
        return [self._perhaps_lost(each) for each in self._inner.contains(keys, deadline=deadline)]

    def get_into(self, keys: Sequence[PackedKey], parts: Parts, *, deadline: float) -> list[int | Outcome]:
        self._call()
        unread = [[bytes(part) for part in each] if self._hits("short") else None for each in parts]
        outcomes = self._inner.get_into(keys, parts, deadline=deadline)
        for index, (each, before, outcome) in enumerate(zip(parts, unread, outcomes, strict=True)):
            if not isinstance(outcome, Outcome):
                if before is not None:
                    outcomes[index] = self._unread(each, before, outcome)
                if self._hits("flip"):
                    self._flip(each)
        return [self._perhaps_lost(each) for each in outcomes]

    def put(self, keys: Sequence[PackedKey], parts: Parts, *, deadline: float) -> list[Outcome]:
        self._call()
        kept = [index for index in range(len(keys)) if not self._hits("lost")]
        sent = [self._perhaps_spoilt(parts[index]) for index in kept]
        outcomes = [Outcome.STORED] * len(keys)
        for index, outcome in zip(kept, self._inner.put([keys[i] for i in kept], sent, deadline=deadline), strict=True):
            outcomes[index] = outcome
        return outcomes

    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        self._call()
        return self._inner.delete(keys, deadline=deadline)

    def touch(self, keys: Sequence[PackedKey], *, deadline: float) -> None:
        self._call()
        self._inner.touch(keys, deadline=deadline)

    def usage(self, *, deadline: float) -> TierUsage:
        self._call()
        return self._inner.usage(deadline=deadline)

    def scan(self, *, deadline: float) -> Iterator[TierEntry]:
        self._call()
        return self._inner.scan(deadline=deadline)

    def capabilities(self) -> frozenset[str]:
        return self._inner.capabilities()

    def ping(self, *, deadline: float) -> None:
        self._call()
        self._inner.ping(deadline=deadline)

    def close(self) -> None:
        self._inner.close()

    def _hits(self, kind: str) -> bool:
        with self._lock:
            hit = kind in self._kinds and self._random.random() < self._rate
            self.injected[kind] += hit
        return hit

    def _below(self, number: int) -> int:
        with self._lock:
            return self._random.randrange(number)

    def _call(self) -> None:
        if self._hits("slow"):
            time.sleep(self._slow_s)
        if self._hits("refused"):
            raise TierError("refused by the test", where=self.name)

    def _perhaps_lost(self, outcome: R) -> R | Outcome:
        there = outcome is Outcome.FOUND or not isinstance(outcome, Outcome)
        return Outcome.MISSING if there and self._hits("lost") else outcome

    def _perhaps_spoilt(self, parts: Sequence[memoryview]) -> Sequence[memoryview]:
        short, flip = self._hits("short"), self._hits("flip")
        if not (short or flip):
            return parts
        value = bytearray(b"".join(parts))
        if flip:
            self._flip([memoryview(value)])
        return [memoryview(value)[: self._below(len(value)) if short and value else None]]

    def _unread(self, parts: Sequence[memoryview], before: Sequence[bytes], received: int) -> int:
        """Restore the former content of `parts` from a random byte on, and return the number of bytes before it."""
        kept = first = self._below(max(received, 1))
        for part, old in zip(parts, before, strict=True):
            at = min(first, part.nbytes)
            part[at:] = old[at:]
            first -= at
        return kept

    def _flip(self, parts: Sequence[memoryview]) -> None:
        total = sum(part.nbytes for part in parts)
        if total:
            at = self._below(total)
            for part in parts:
                if at < part.nbytes:
                    part[at] ^= 1 << self._below(8)
                    return
                at -= part.nbytes
