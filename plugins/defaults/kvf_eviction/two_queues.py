"""The policy `two_queues`: objects that were used again apart from those that were not. Called in the server, under the
storage lock; pure.

Each queue is in the order of use. Of the two oldest objects that one leaves whose age promises fewer hits for the place
that it takes up, as learned from the uses of the objects of its queue, those included that came back after they left
(`kvf_eviction.reuse`). So how much of L1 each queue has follows from the traffic. Where nothing is known yet, and for a
while where LRU would have found more (`kvf_eviction.against_lru`), the oldest object leaves. What requests say of
objects comes before all that (`kvf_eviction.hinted`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain

from kvf_eviction.against_lru import AgainstLru
from kvf_eviction.ghost_marks import MARK_BITS, WAYS, GhostMarks
from kvf_eviction.hinted import Hinted, sized
from kvf_eviction.reuse import BINS, Reuse, age_bin
from kvframework.api.eviction import EvictionPolicy, PackedKey, RequestFacts, Why

# Ghosts for each object in L1, at least.
GHOSTS = 4
# Per object in L1, objects that come between two times of learning, and until what was learned weighs half as much.
LEARN_EVERY, FORGET_EVERY = 1 / 8, 8
LEAST_TO_LEARN, LEAST_TO_FORGET = 256, 4096
# The share of the objects in L1 that must have reached an age before anything is concluded about it.
LEAST_SHARE = 0.02
# A mark has the time in objects, the request, and the queue: 0 for once, 1 for again.
_REQUEST_BITS = 16
_TIME = _REQUEST_BITS + 1
_REQUEST = (1 << _TIME) - 2
# A ghost's mark has no more of the time, and the queue.
_GHOST_TIME = (1 << MARK_BITS - 1) - 1
_BY_AGE = [0.0] * BINS
# How many times as much as an object that was used again one must promise that was not, and is older: what leaves then
# may be the beginning of a prompt whose end stays.
_SURE = 2.0
_NO_FACTS = RequestFacts(use="lookup", at=0.0)


class TwoQueues(EvictionPolicy):
    """See the module. Several uses by the request of the same id are one; uses without an id are by as many requests.

    Every call is O(1) for each key, but for less than a millisecond each time that an eighth of L1 has come. There
    are 4 to 8 ghosts for each object, of 32 bytes each.
    """

    name = "two_queues"

    def __init__(self) -> None:
        self._queues: tuple[OrderedDict[PackedKey, int], ...] = (OrderedDict(), OrderedDict())
        self._reuse = (Reuse(), Reuse())
        self._ghosts = GhostMarks(WAYS)
        self._lru = AgainstLru()
        self._hinted = Hinted()
        # In objects that came.
        self._now = 1
        self._learns_at, self._forgets_at = LEAST_TO_LEARN, LEAST_TO_FORGET

    def __len__(self) -> int:
        return len(self._queues[0]) + len(self._queues[1]) + len(self._hinted)

    def on_insert(self, key: PackedKey, nbytes: int) -> None:
        self.on_inserts((key,), (nbytes,), (-1,), _NO_FACTS)

    def on_inserts(
        self, keys: Sequence[PackedKey], sizes: Sequence[int], chunks: Sequence[int], facts: RequestFacts
    ) -> None:
        queues, ghosts, now, request = self._queues, self._ghosts, self._now, _request_of(facts)
        again = False
        for key in keys:
            now += 1
            ghost = ghosts.take(key)
            # Who used a chunk used all before it, which come next: a prompt must not be in two parts.
            again = ghost >= 0 or (again and facts.use == "store")
            if ghost >= 0:
                age = now - (ghost >> 1) & _GHOST_TIME
                self._reuse[ghost & 1].ended[age_bin(age)] += 1
                self._lru.ended(now - age, now, here=False)
            self._reuse[again].began += 1
            queues[again][key] = now << _TIME | request | again
        self._now = now
        self._lru.began(len(keys))
        if now >= self._learns_at:
            self._learn()
        self._heed(keys, facts)

    def on_access(self, key: PackedKey) -> None:
        self.on_uses((key,), _NO_FACTS)

    def on_access_many(self, keys: Sequence[PackedKey]) -> None:
        self.on_uses(keys, _NO_FACTS)

    def on_uses(self, keys: Sequence[PackedKey], facts: RequestFacts) -> None:
        once, again = self._queues
        hinted, given = self._hinted, keys
        if hinted.has_any(keys):
            keys = [key for key in keys if key not in hinted.kept]
        now, request = self._now, _request_of(facts)
        new = now << _TIME | request | 1
        began, of, alike, queue, young = 0, 0, 0, again, new
        for key in keys:
            mark = again.pop(key, 0) or once.pop(key, 0) or hinted.done.pop(key)
            if mark != of:  # most often a prompt's objects were used at one time
                began += self._ended(of, now, alike, request)
                of, alike, queue, young = mark, 0, again, new
                if request and mark & _REQUEST == request:
                    queue, young = self._queues[mark & 1], new & -2 | mark & 1
            queue[key] = young
            alike += 1
        began += self._ended(of, now, alike, request)
        self._reuse[1].began += began
        self._lru.began(began)
        self._heed(given, facts)

    def on_remove(self, key: PackedKey) -> None:
        self.on_removes((key,), "evicted")

    def on_removes(self, keys: Sequence[PackedKey], why: Why) -> None:
        if len(self) * GHOSTS > self._ghosts.most:
            self._ghosts = GhostMarks(1 << (len(self) * GHOSTS - 1).bit_length())
        once, again = self._queues
        for key in keys:
            mark = once.pop(key, 0) or again.pop(key, 0) or self._hinted.take(key)
            assert mark, "only what is in leaves"
            if why == "evicted":
                self._ghosts.add(key, (mark >> _TIME & _GHOST_TIME) << 1 | mark & 1)

    def victims(self) -> Iterator[PackedKey]:
        self._hinted.full()
        return chain(self._hinted.done, self._by_worth(), self._hinted.last()) if self._hinted else self._by_worth()

    def _by_worth(self) -> Iterator[PackedKey]:
        once, again = (iter(queue.items()) for queue in self._queues)
        worths, now = [_BY_AGE if self._lru.by_age else reuse.worth for reuse in self._reuse], self._now
        one, other = next(once, None), next(again, None)
        while one is not None and other is not None:
            age, other_age = now - (one[1] >> _TIME), now - (other[1] >> _TIME)
            worth, other_worth = worths[0][age_bin(age)], worths[1][age_bin(other_age)]
            if worth > other_worth * _SURE if age >= other_age else worth >= other_worth:
                yield other[0]
                other = next(again, None)
            else:
                yield one[0]
                one = next(once, None)
        for head, walk in ((one, once), (other, again)):
            if head is not None:
                yield head[0]
                yield from (key for key, _ in walk)

    def _heed(self, keys: Sequence[PackedKey], facts: RequestFacts) -> None:
        """Do as the request says, and give back what was kept for long enough, as young as what comes now."""
        hinted, (once, again) = self._hinted, self._queues
        for key, mark in hinted.due(facts):
            self._lru.moved(mark >> _TIME)
            self._queues[mark & 1][key] = self._now << _TIME | mark & (1 << _TIME) - 1
        if not facts.hint:
            return
        is_done = facts.hint == "done"
        for key, nbytes in sized(keys, facts):
            if is_done or hinted.may_keep(key, nbytes):
                mark = once.pop(key, 0) or again.pop(key, 0) or hinted.take(key) or 0
                if is_done:
                    hinted.add_done(key, mark)
                else:
                    hinted.add_kept(key, nbytes, mark, facts)

    def _ended(self, mark: int, now: int, objects: int, request: int) -> int:
        """Count the waits of objects with the same mark, which end with a use by this request; return their number."""
        if not objects:
            return 0
        at = mark >> _TIME
        if request and mark & _REQUEST == request:
            # No other use, but as young as what this request has stored meanwhile.
            self._lru.moved(at, objects)
            return 0
        self._reuse[mark & 1].ended[age_bin(now - at)] += objects
        self._lru.ended(at, now, here=True, objects=objects)
        return objects

    def _learn(self) -> None:
        held, now = len(self), self._now
        self._lru.judge(now, held)
        forget = now >= self._forgets_at
        for reuse in self._reuse:
            if forget:
                reuse.forget_half()
            reuse.learn(now, LEAST_SHARE * held)
        if forget:
            self._forgets_at = now + max(LEAST_TO_FORGET, FORGET_EVERY * held)
        self._learns_at = now + max(LEAST_TO_LEARN, int(LEARN_EVERY * held))


def _request_of(facts: RequestFacts) -> int:
    """Return the part of a mark that names the request, 0 for an unknown one."""
    return (hash(facts.request_id) << 1 & _REQUEST or 2) if facts.request_id else 0
