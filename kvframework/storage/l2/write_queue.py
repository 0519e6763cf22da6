"""The write queue of one L2 tier: objects that wait, are being sent, or were refused and wait for another attempt. A
pure state machine: no I/O, no clock, no lock (the writer serialises calls).

Each accepted object ends in one way: written, lost (it left L1 before), or given up. Objects offered beyond the bound
are dropped. Several batches may be in flight; an object is in one of them at most, so that no two writers ever send the
same key.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvframework.api.keys import PackedKey
from kvframework.storage.l2.write_policy import WritePolicy

BATCH_OBJECTS = 16
# How often a batch of one object may fail as a whole, and how often the tier may refuse one object of a batch.
MAX_ATTEMPTS = 8
MAX_REFUSALS = 3
REFUSED_PAUSE_S = 0.5


class Batch:
    """The keys that one writer has taken, in their order."""

    def __init__(self, keys: Sequence[PackedKey]) -> None:
        self.keys = keys


class WriteQueue:
    """`count` adds to counters by name: `write_dropped`, `write_lost`, `write_given_up`.

    `bound` is the number of objects that may wait; `writers` batches may be in flight. Objects that a batch could not
    send wait again beyond the bound, so at most the bound and the batches in flight are pending.
    """

    def __init__(self, policy: WritePolicy, bound: int, count: Callable[..., None], writers: int = 1) -> None:
        self.policy = policy
        self.bound = bound
        self._writers = writers
        self._count = count
        self._waiting: OrderedDict[PackedKey, None] = OrderedDict()
        # Keys taken for a batch and not settled; each batch's in its order.
        self._sending: dict[PackedKey, Batch] = {}
        # The time of each next attempt, the soonest first; and the number of refusals.
        self._refused: dict[PackedKey, float] = {}
        self._refusals: dict[PackedKey, int] = {}
        self._at_once = BATCH_OBJECTS
        # For keys of batches that failed as a whole: the size of their next batch, and how often each failed alone.
        self._most: dict[PackedKey, int] = {}
        self._attempts: Counter[PackedKey] = Counter()

    @property
    def pending(self) -> int:
        return len(self._waiting) + len(self._sending) + len(self._refused)

    @property
    def room(self) -> int:
        return max(self.bound - len(self._waiting) - len(self._refused), 0)

    def wait_s(self, now: float) -> float:
        """Return the seconds until there is something to send; infinite if nothing waits."""
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
        """Return those of `keys` that L1 must keep until they are written; they are queued, as far as there is room."""
        unwritten = self.policy.leaving(keys)
        fresh = [key for key in unwritten if not self._holds(key)]
        self.offer(fresh[: self.room])
        return unwritten

    def removed(self, key: PackedKey) -> None:
        """An object has left L1."""
        if self.policy.removed(key):
            self._waiting.pop(key, None)
            self._sending.pop(key, None)
            self._forget_failures(key)
            self._count(write_lost=1)

    def take(self, now: float) -> Batch:
        """Return the next batch, a fair share of what waits for each of the writers; its keys count as being sent until
        each is settled."""
        for key in [key for key, due in self._refused.items() if due <= now]:
            del self._refused[key]
            self._waiting[key] = None
        keys: list[PackedKey] = []
        most = min(self._at_once, -(-len(self._waiting) // self._writers))
        for key in self._waiting:
            most = min(most, self._most.get(key, most))
            if len(keys) >= most:
                break
            keys.append(key)
        batch = Batch(keys)
        for key in keys:
            del self._waiting[key]
            self._sending[key] = batch
        return batch

    def found(self, batch: Batch, keys: Sequence[PackedKey]) -> list[PackedKey]:
        """Return those of `keys`, the pinned objects of the batch, that this batch sends. Of those that were lost since
        it was taken and stored again these are the ones that wait: not those that another batch took or settled, nor
        those that were dropped."""
        here = set(keys)
        lost = [key for key in self._unsettled(batch) if key not in here]
        for key in lost:
            del self._sending[key]
            self._forget_failures(key)
        if lost:
            self._count(write_lost=len(lost))
        mine = [key for key in keys if self._sending.get(key) is batch or key in self._waiting]
        for key in mine:
            # Includes a key that was lost and stored again since the batch was taken.
            self._waiting.pop(key, None)
            self._sending[key] = batch
        return mine

    def answered(self, keys: Sequence[PackedKey], stored: Sequence[bool], now: float) -> None:
        """Record the tier's answer for each key. The caller still pins them: an object that may be evicted and counts
        as unwritten would be sent again, or counted as lost."""
        self._at_once = min(self._at_once * 2, BATCH_OBJECTS)
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
        if given_up:
            self._count(write_given_up=given_up)

    def failed(self, keys: Sequence[PackedKey]) -> bool:
        """Record that the tier failed at all of these as a whole. Smaller batches fit a slow tier's deadline, and
        separate values that can never be written from the others. Returns True for one object that failed alone so
        often that it should be given up, unless the tier fails at everything."""
        self._at_once = max(self._at_once // 2, 1)
        if len(keys) > 1:
            self._most.update(dict.fromkeys(keys, len(keys) // 2))
            return False
        self._attempts[keys[0]] += 1
        return self._attempts[keys[0]] % MAX_ATTEMPTS == 0

    def give_up(self, keys: Iterable[PackedKey]) -> None:
        """Give up keys that would never be stored."""
        for key in keys:
            self._settle(key)
            self._count(write_given_up=1)

    def give_up_batch(self, batch: Batch) -> None:
        """Give up a batch that met a bug, and would meet it again."""
        self.give_up(self._unsettled(batch))

    def put_back(self, batch: Batch) -> None:
        """End a batch; its unsettled keys are sent next."""
        for key in reversed(self._unsettled(batch)):
            del self._sending[key]
            self._waiting[key] = None
            self._waiting.move_to_end(key, last=False)

    def _holds(self, key: PackedKey) -> bool:
        return key in self._waiting or key in self._refused or key in self._sending

    def _unsettled(self, batch: Batch) -> list[PackedKey]:
        return [key for key, taken in self._sending.items() if taken is batch]

    def _settle(self, key: PackedKey) -> None:
        del self._sending[key]
        self._forget_failures(key)
        if self.policy.watches_l1:
            self.policy.written([key])

    def _forget_failures(self, key: PackedKey) -> None:
        self._refused.pop(key, None)
        self._refusals.pop(key, None)
        self._most.pop(key, None)
        self._attempts.pop(key, None)
