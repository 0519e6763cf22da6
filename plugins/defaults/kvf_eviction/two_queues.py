"""The policy `two_queues`: objects that were used again apart from those that were not. Called in the server, under the
storage lock; pure.

Each queue is in the order of use. Of the two oldest objects that one leaves whose age promises fewer hits for the place
that it takes up, as learned from the uses of the objects of its queue, those included that came back after they left
(`Reuse`). So how much of L1 each queue has follows from the traffic. Where nothing is known yet, and for a while where
LRU would have found more (`AgainstLru`), the oldest object leaves. What requests say of objects comes before all that
(`kvf_eviction.hinted`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from struct import Struct

from kvf_eviction.hinted import Hinted, sized
from kvframework.api.eviction import EvictionPolicy, PackedKey, RequestFacts, Why

# Whether `two_queues` finds more than LRU would, so that it gives way where it does not. LRU holds what was used last,
# as many objects as L1 has: so it would have found an object that is used again at an age up to that of its oldest one.
# A use of an older object that L1 has is a gain, and one of a younger object that is only a ghost is a loss.

# Times of which the number of objects that were used last in them is known.
_TIMES = 256
# Losses for each object in L1 that end a trial, and at least as many as this share of what is asked for.
_LOSS, _LOSS_OF_USES = 0.05, 0.01
# Objects that come for each object in L1 until the next trial, at first and at most.
_PAUSE, _LONGEST_PAUSE = 8.0, 64.0


class AgainstLru:
    """`by_age` says that the order should be that of LRU for now; `reach` is the age of what LRU would evict next. Time
    and ages are in objects that came."""

    def __init__(self) -> None:
        self.by_age = False
        self.reach = 0
        # Gains minus losses of this trial, and the uses in it.
        self.balance = 0
        self.uses = 0
        # The ends of times, and the objects that were used last in each; the last time has not ended.
        self._ends: list[int] = []
        self._last_used = [0]
        self._pause = _PAUSE
        self._resumes_at = 0

    def began(self, objects: int) -> None:
        """Count objects that came or were used just now."""
        self._last_used[-1] += objects
        self.uses += objects

    def moved(self, at: int, objects: int = 1) -> None:
        """Count objects, used before at the time `at`, as used last just now, without a use."""
        if self._ends and at <= self._ends[-1]:
            self._last_used[bisect_left(self._ends, at)] -= objects
            self._last_used[-1] += objects

    def ended(self, at: int, now: int, *, here: bool, objects: int = 1) -> None:
        """Count the use of objects that were used before at the time `at`; `here` if L1 has them."""
        self._last_used[bisect_left(self._ends, at)] -= objects
        if here != (now - at <= self.reach):
            self.balance += objects if here else -objects

    def judge(self, now: int, held: int) -> None:
        """End a time, and decide the order of the next one."""
        self._ends.append(now)
        self._last_used.append(0)
        if len(self._ends) > _TIMES:
            del self._ends[0]
            self._last_used[:2] = [sum(self._last_used[:2])]
        youngest = 0
        self.reach = now
        for index in range(len(self._ends) - 1, -1, -1):
            youngest += self._last_used[index]
            if youngest >= held:
                self.reach = now - (self._ends[index - 1] if index else 0)
                break
        if self.by_age:
            if now >= self._resumes_at:
                self.by_age, self.balance, self.uses = False, 0, 0
        elif self.balance < -max(_LOSS * held, _LOSS_OF_USES * self.uses):
            self.by_age = True
            self._resumes_at = now + int(self._pause * held)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        elif self.uses > 8 * held:
            # What was long ago counts half.
            if self.balance > _LOSS * held:
                self._pause = _PAUSE
            self.balance, self.uses = self.balance // 2, self.uses // 2


# The ghosts of `two_queues`: a mark for each of the keys that left L1 last.
# A key has one set of `WAYS` places, found by its hash; a new ghost takes the place of the oldest one of its set. Of a
# full table the newest half is there but for one in a hundred, and no other is used: ghosts of one prompt are forgotten
# together, since a part of it that counts as used again, behind a part that does not, would be of no use. Two keys of
# the same hash are one ghost; then a number is wrong, and nothing else.

WAYS = 16
MARK_BITS = 32
_CODE = Struct("=q")
_SET_BYTES = WAYS * _CODE.size
_COUNT = (1 << 31) - 1
_pack = _CODE.pack


class GhostMarks:
    """The last `most` ghosts, a power of two of at least `WAYS`, in 32 bytes each. A mark has `MARK_BITS` bits."""

    def __init__(self, most: int) -> None:
        self.most = most
        places = 2 * most
        self._codes = bytearray(_CODE.size * places)
        # The number of the ghost, and its mark.
        self._marks = array("q", bytes(8 * places))
        # Of each set the way that the next ghost takes.
        self._next = bytearray(places // WAYS)
        self._sets = places // WAYS - 1
        self._count = 0

    @property
    def nbytes(self) -> int:
        return len(self._codes) + 8 * len(self._marks) + len(self._next)

    def add(self, key: PackedKey, mark: int) -> None:
        """Remember a key that has no ghost. 0.4 us."""
        code = hash(key)
        number = code & self._sets
        way = self._next[number]
        self._next[number] = (way + 1) % WAYS
        place = number * WAYS + way
        _CODE.pack_into(self._codes, place * _CODE.size, code)
        self._count = count = self._count + 1 & _COUNT
        self._marks[place] = count << MARK_BITS | mark

    def take(self, key: PackedKey) -> int:
        """Forget the ghost of a key; return its mark, -1 for none. 0.3 us."""
        code = hash(key)
        first = (code & self._sets) * _SET_BYTES
        packed = _pack(code)
        at = self._codes.find(packed, first, first + _SET_BYTES)
        while at > 0 and at % _CODE.size:
            at = self._codes.find(packed, at + 1, first + _SET_BYTES)
        if at < 0:
            return -1
        _CODE.pack_into(self._codes, at, 0)
        mark = self._marks[at // _CODE.size]
        newer = self._count - (mark >> MARK_BITS) & _COUNT
        return mark & (1 << MARK_BITS) - 1 if newer < self.most else -1


# How soon objects of a queue are used again, and what it is worth to keep one of a certain age.
# Time is counted in objects that came into L1. An object begins to wait at each use by another request; the wait ends
# with the next one, in L1 or after it left, as long as its ghost is remembered. From the waits that ended at an age, as
# a share of those that are old enough to have ended there, follows for each age how many hits an object of that age
# promises for the time that it takes up a place, if it is kept for as long as pays best.

# Ages up to 2^30 objects: 0, 1, 2, 3, 4 to 5, 6 to 7, 8 to 11, and so on.
BINS = 60
_EDGES = [0, 1, *(((2 + half) << bits) // 2 for bits in range(1, 31) for half in (0, 1))][: BINS + 1]
_WIDTHS = [end - first for first, end in pairwise(_EDGES)]
_MIDDLES = [(first + end) / 2 for first, end in pairwise(_EDGES)]
# Times between two calls of `learn` of which the number of waits that began is known.
_LEARNED_TIMES = 64
# Never quite none is left, so that a wrong sum cannot make an age infinitely dear.
_LEFT = 0.01


def age_bin(age: int) -> int:
    bits = age.bit_length()
    return age if bits < 2 else min(2 * bits - 2 + (age >> (bits - 2) & 1), BINS - 1)


class Reuse:
    """The waits of one queue. `worth` has hits for each object and time, by the bin of its age."""

    def __init__(self) -> None:
        self.worth = [0.0] * BINS
        # Waits that began since the last `learn`, and that ended, by age.
        self.began = 0
        self.ended = [0.0] * BINS
        # Of each earlier time between two calls of `learn`, the latest last: its end, and the waits that began.
        self._times: list[tuple[int, float]] = []
        self._earlier = 0.0

    def learn(self, now: int, least: float) -> None:
        """Compute `worth` from what was counted so far; an age that fewer than `least` waits can have reached promises
        nothing."""
        self._times.append((now, self.began))
        self.began = 0
        if len(self._times) > _LEARNED_TIMES:
            self._earlier += self._times.pop(0)[1]
        shares = self._shares(now, least)
        # The best average from each age on: the upper hull of hits over time, built from the oldest age.
        left = list(accumulate(shares, lambda rest, share: max(rest - share, _LEFT), initial=1.0))
        hull: list[tuple[float, float]] = []
        for index in range(BINS - 1, -1, -1):
            hits = shares[index]
            time = max(left[index] - hits / 2, _LEFT) * _WIDTHS[index]
            while hull and hull[-1][0] * time > hits * hull[-1][1]:
                more = hull.pop()
                hits, time = hits + more[0], time + more[1]
            hull.append((hits, time))
            self.worth[index] = hits / time

    def forget_half(self) -> None:
        """Let what was counted so far weigh half as much."""
        self.ended = [count / 2 for count in self.ended]
        self._times = [(at, count / 2) for at, count in self._times]
        self._earlier /= 2

    def _shares(self, now: int, least: float) -> list[float]:
        """Return by age how many of all waits end there."""
        shares = [0.0] * BINS
        reached, times = self._earlier, 0
        for index in range(BINS - 1, -1, -1):
            while times < len(self._times) and now - self._times[times][0] >= _MIDDLES[index]:
                reached += self._times[times][1]
                times += 1
            if reached >= least and reached:
                shares[index] = min(self.ended[index] / reached, 1.0)
        return shares


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
