"""Owns what is on its way to one L2 tier: which objects wait, are being sent, or were refused and wait to be tried
again. A pure state machine: no I/O, no clock, no lock (the write-back serialises calls).

Each object that was taken on ends in one way: written, lost (it left L1 before), or given up. What is offered beyond
the bound is dropped.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvframework.api import PackedKey
from kvframework.storage.write_policy import WritePolicy

BATCH_OBJECTS = 16
# How often a whole batch of one object may fail, and how often the tier may refuse one object of a batch.
MAX_ATTEMPTS = 8
MAX_REFUSALS = 3
REFUSED_PAUSE_S = 0.5


class WriteQueue:
    """`count` adds to counters by name: `write_dropped`, `write_lost`, `write_given_up`."""

    def __init__(self, policy: WritePolicy, bound: int, count: Callable[..., None]) -> None:
        self.policy = policy
        self._bound = bound
        self._count = count
        self._waiting: OrderedDict[PackedKey, None] = OrderedDict()
        # Taken for a batch and not settled; in its order.
        self._sending: dict[PackedKey, None] = {}
        # When each may be sent again, the soonest first; and how often it was refused.
        self._refused: dict[PackedKey, float] = {}
        self._refusals: dict[PackedKey, int] = {}
        self._at_once = BATCH_OBJECTS
        self._attempts = 0

    @property
    def pending(self) -> int:
        return len(self._waiting) + len(self._sending) + len(self._refused)

    @property
    def room(self) -> int:
        return max(self._bound - len(self._waiting) - len(self._refused), 0)

    def wait_s(self, now: float) -> float:
        """Seconds until there is something to send; infinite if nothing waits."""
        if self._waiting:
            return 0.0
        return max(next(iter(self._refused.values()), math.inf) - now, 0.0)

    def offer(self, keys: Iterable[PackedKey]) -> None:
        for key in keys:
            if self._holds(key):
                continue
            if self.room:
                self._waiting[key] = None
            else:
                self._count(write_dropped=1)

    def leaving(self, keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
        """Those of `keys` that L1 is to keep until they are written; they wait from now on, as far as there is room."""
        unwritten = self.policy.leaving(keys)
        fresh = [key for key in unwritten if not self._holds(key)]
        self.offer(fresh[: self.room])
        return unwritten

    def removed(self, key: PackedKey) -> None:
        """An object has left L1."""
        if self.policy.removed(key):
            self._waiting.pop(key, None)
            self._sending.pop(key, None)
            self._forget_refusals(key)
            self._count(write_lost=1)

    def take(self, now: float) -> list[PackedKey]:
        """The next batch; until each of it is settled it is being sent."""
        for key in [key for key, due in self._refused.items() if due <= now]:
            del self._refused[key]
            self._waiting[key] = None
        batch = [self._waiting.popitem(last=False)[0] for _ in range(min(len(self._waiting), self._at_once))]
        self._sending = dict.fromkeys(batch)
        return batch

    def found(self, keys: Sequence[PackedKey]) -> None:
        """What of the batch is in L1, and pinned from here on."""
        gone = self._sending.keys() - set(keys)
        for key in gone:
            self._forget_refusals(key)
        self._count(write_lost=len(gone))
        # Also what was lost and stored again since it was taken.
        self._sending = dict.fromkeys(keys)
        for key in keys:
            self._waiting.pop(key, None)

    def answered(self, keys: Sequence[PackedKey], stored: Sequence[bool], now: float) -> None:
        """The tier said what became of each. Told while they are pinned: what may be evicted and counts as unwritten
        would be sent again, or counted as lost."""
        self._at_once, self._attempts = min(self._at_once * 2, BATCH_OBJECTS), 0
        given_up = 0
        for key, ok in zip(keys, stored, strict=True):
            refusals = 0 if ok else self._refusals.get(key, 0) + 1
            if not ok and refusals < MAX_REFUSALS:
                del self._sending[key]
                self._refusals[key] = refusals
                self._refused[key] = now + REFUSED_PAUSE_S
                continue
            given_up += not ok
            self._settle(key)
        self._count(write_given_up=given_up)

    def failed(self, keys: Sequence[PackedKey]) -> bool:
        """The tier failed as a whole. Smaller batches fit a slow tier's deadline. True for one object that failed so
        often that it is to be given up, since it keeps all others waiting, unless the tier fails at everything."""
        self._at_once = max(self._at_once // 2, 1)
        if len(keys) > 1:
            return False
        self._attempts = (self._attempts + 1) % MAX_ATTEMPTS
        return self._attempts == 0

    def give_up(self, keys: Iterable[PackedKey] | None = None) -> None:
        """These would never get there; None: the batch met a bug, and would meet it again."""
        for key in list(self._sending if keys is None else keys):
            self._settle(key)
            self._count(write_given_up=1)

    def put_back(self) -> None:
        """The batch is over; what of it is not settled is sent next."""
        for key in reversed(self._sending):
            self._waiting[key] = None
            self._waiting.move_to_end(key, last=False)
        self._sending = {}

    def _holds(self, key: PackedKey) -> bool:
        return key in self._waiting or key in self._refused or key in self._sending

    def _settle(self, key: PackedKey) -> None:
        del self._sending[key]
        self._forget_refusals(key)
        self.policy.written([key])

    def _forget_refusals(self, key: PackedKey) -> None:
        self._refused.pop(key, None)
        self._refusals.pop(key, None)
