"""Load or recompute: how fast engines compute and tiers load, learned, and where a hit is cut. Pure: the caller has the
clock and the lock.

For a cut behind m chunks, of a prompt of n tokens:

    T(m) = max(the longest load of a tier's part, the wait of the engine) + C(m, n)

and what the work costs other requests, at the tiers and at the engine. The cut with the least sum is taken, of equal
ones the longest.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Annotated, NamedTuple

import msgspec

from kvframework.api.plugin import Message

# A sample counts as this many times more or less than expected at most, and for 1 / `RECENT` of the mean.
CLIP = 4.0
RECENT = 16
# The ratio to what was expected from which on a sample is a surprise.
SURPRISE = 2.0
# Samples before anything is known, and surprises in a row before they are believed.
SEEDS = 3
# Seconds for a unit, of whatever kind, and the amounts and times that can be true.
LEAST, MOST = 1e-15, 1e6
LEAST_WORK, MOST_WORK = 1e-3, 1e18
MOST_S = 1e6

Sample = tuple[float, float, float]


class LearnedPrice:
    """`seconds = first * prices[0] + second * prices[1]`, both prices never negative: the least squares of the relative
    errors of the last samples, some `RECENT` of them. Samples with other mixes of the two kinds distinguish them; as
    long as all are alike the second kind costs nothing.

    One absurd sample makes usual work dearer by 1.75 at most. `SEEDS` surprises in the same direction, each begun after
    the one before was known, take the place of the past. So a change is learned at once, and a pause, which spoils all
    that is under way, is one surprise, of which only the first sample is learned."""

    def __init__(self) -> None:
        # None before the first `SEEDS` samples.
        self.prices: tuple[float, float] | None = None
        self.last_at = -math.inf
        # The means of first * first, first * second, second * second, first * seconds, second * seconds.
        self._moments = [0.0] * 5
        self._learned = 0
        # The first samples, later the last surprises in a row; their direction, and when the last of them was known.
        self._row: list[Sample] = []
        self._direction = 0
        self._surprised_at = 0.0

    def add(self, seconds: float, first: float, second: float = 0.0, *, began: float, now: float) -> None:
        """Learn from work that took `seconds` and has ended `now`. What cannot be true is ignored."""
        if not (LEAST_WORK <= first <= MOST_WORK and 0 <= second <= MOST_WORK and 0 <= seconds <= MOST_S):
            return
        self.last_at = max(now, self.last_at)
        sample = seconds, first, second
        if self.prices is not None:
            ratio = seconds / self._expected(first, second)
            direction = 1 if ratio > SURPRISE else -1 if ratio * SURPRISE < 1 else 0
            if direction and direction == self._direction and began < self._surprised_at:
                return  # it was under way when the last surprise ended
            if direction != self._direction:
                self._direction, self._row = direction, []
        if self.prices is None or self._direction:
            self._row.append(sample)
            self._surprised_at = now
        if len(self._row) >= SEEDS:
            self._begin_with(self._row)
            self._row, self._direction = [], 0
        elif self.prices is not None:
            self._learn(*sample)

    def _begin_with(self, samples: Sequence[Sample]) -> None:
        """Forget all others, except for the ratio of the kinds."""
        if self.prices is None:
            self.prices = _bounded(median(seconds / first for seconds, first, _ in samples)), 0.0
        else:
            level = median(seconds / self._expected(first, second) for seconds, first, second in samples)
            self.prices = _bounded(self.prices[0] * level), min(self.prices[1] * level, MOST)
        self._learned = 0
        for sample in samples:
            self._learn(*sample)

    def _learn(self, seconds: float, first: float, second: float) -> None:
        self._learned += 1
        share = max(1 / self._learned, 1 / RECENT)
        expected = self._expected(first, second)
        ratio = min(max(seconds / expected, 1 / CLIP), CLIP)
        first, second = first / expected, second / expected
        sample = (first * first, first * second, second * second, first * ratio, second * ratio)
        self._moments = [old * (1 - share) + new * share for old, new in zip(self._moments, sample, strict=True)]
        self.prices = self._solved()

    def _expected(self, first: float, second: float) -> float:
        assert self.prices is not None
        return self.prices[0] * first + self.prices[1] * second

    def _solved(self) -> tuple[float, float]:
        """Return the least squares of the moments; the present ratio stays where the kinds are not told apart, or one
        would be free."""
        assert self.prices is not None
        aa, ab, bb, ay, by = self._moments
        determinant = aa * bb - ab * ab
        if determinant > 1e-6 * aa * bb:
            first, second = (ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant
            if first > 0 and second >= 0:
                return _bounded(first), min(second, MOST)
            if second <= 0:
                return _bounded(ay / aa), 0.0
        first, second = self.prices
        scale = (first * ay + second * by) / (first * first * aa + 2 * first * second * ab + second * second * bb)
        return _bounded(first * scale), min(second * scale, MOST)


def _bounded(price: float) -> float:
    return min(max(price, LEAST), MOST)


class EngineSpeed(Message, frozen=True):
    """The speed of an engine: `tokens_per_s` of prefill without a context; `attention_tokens`, the length of a context
    at which a token takes twice as long, 0 if the context does not matter; `queued_s`, the seconds of prefill that the
    engine has besides this request, also of prompts that wait and are not looked up yet: it computes those while a load
    is under way. Without those of prompts whose loads are under way: their server knows them. A decoder refuses numbers
    that are out of bounds or not finite, as `check` does."""

    tokens_per_s: Annotated[float, msgspec.Meta(ge=1e-3, le=1e12)]
    attention_tokens: Annotated[float, msgspec.Meta(ge=0.0, le=1e12)] = 0.0
    queued_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 0.0

    def check(self) -> None:
        """Raise `ValueError` for numbers that are out of bounds or not finite."""
        msgspec.convert(msgspec.structs.asdict(self), EngineSpeed)

    def prefill_s(self, first: int, last: int) -> float:
        """Return the seconds to compute the tokens `[first, last)` of a prompt."""
        return prefill_s(first, last, self.tokens_per_s, self.attention_tokens)


def prefill_s(first: int, last: int, tokens_per_s: float, attention_tokens: float = 0.0) -> float:
    """Return `C(first, last)`, the seconds to compute the tokens `[first, last)` of a prompt whose first tokens are
    there: each takes `1 / tokens_per_s`, and as much again for every `attention_tokens` of context; less than 1: the
    context does not matter."""
    tokens = float(last - first)
    if attention_tokens >= 1.0:
        tokens += context_area(first, last) / attention_tokens
    return tokens / tokens_per_s


def context_area(first: int, last: int) -> float:
    """Return the sum of the contexts of the tokens `[first, last)`, in tokens squared."""
    return (last - first) * (last + first) / 2


# A request with fewer tokens in a step generates, or ends its prompt: that says nothing of prefill.
LEAST_TOKENS = 32
# Steps under way that are remembered.
MOST_STEPS = 16

# The first tokens, which are there, and how many there are with those that are to be computed.
Part = tuple[int, int]


class PrefillMeter:
    """The speed of one engine. Each step begins and ends; of several under way the first one ends first. What a step
    computes beside prompts makes it slower, as it does for the next prompt. Not thread-safe."""

    def __init__(self) -> None:
        self._price = LearnedPrice()
        # When each step under way began, and its tokens and the sum of their contexts; 0 tokens: it says nothing.
        self._steps: deque[tuple[float, int, float]] = deque(maxlen=MOST_STEPS)
        self._ended = -math.inf

    def begin_step(self, parts: Iterable[Part], now: float, *, counts: bool = True) -> None:
        """A step begins that computes these parts of prompts; unless it `counts` its time is not that of computing."""
        prefills = [part for part in parts if counts and part[1] - part[0] >= LEAST_TOKENS]
        tokens = sum(last - first for first, last in prefills)
        self._steps.append((now, tokens, sum(context_area(*part) for part in prefills)))

    def end_step(self, now: float) -> None:
        """The first step that is under way has ended."""
        if not self._steps:
            return
        began, tokens, area = self._steps.popleft()
        # One that began during another waited for that.
        since, self._ended = max(began, self._ended), now
        if tokens:
            self._price.add(now - since, tokens, area, began=since, now=now)

    def speed(self, queued: Iterable[Part]) -> EngineSpeed | None:
        """Return what the engine may say with a LOOKUP, before which `queued` are to be computed; None as long as its
        speed is not known."""
        prices = self._price.prices
        if prices is None:
            return None
        token_s, context_s = prices
        parts = [part for part in queued if part[0] < part[1]]
        tokens = sum(last - first for first, last in parts)
        queued_s = token_s * tokens + context_s * sum(context_area(*part) for part in parts)
        attention = token_s / context_s if context_s * 1e12 > token_s else 0.0
        return EngineSpeed(min(max(1 / token_s, 1e-3), 1e12), min(attention, 1e12), min(queued_s, 1e6))


HORIZON_S = 120.0
# At the begin this time counts as passed, so that two requests at once are no crowd.
LEAST_S = 5.0


class Traffic:
    """The requests of the last `HORIZON_S` seconds; what was a while ago counts less. Not thread-safe."""

    def __init__(self, now: float) -> None:
        self._began = self._at = now
        self._count = self._work = 0.0

    def add(self, now: float, requests: int = 1, work: float = 0.0) -> None:
        """Count requests that have come since the last call, with their work in any unit."""
        self._decay(now)
        self._count += requests
        self._work += work

    def rates(self, now: float) -> tuple[float, float]:
        """Return the requests and the work a second."""
        self._decay(now)
        passed = max(self._at - self._began, LEAST_S)
        seconds = HORIZON_S * (1.0 - math.exp(-passed / HORIZON_S))
        return self._count / seconds, self._work / seconds

    def _decay(self, now: float) -> None:
        if now > self._at:
            kept = math.exp((self._at - now) / HORIZON_S)
            self._count *= kept
            self._work *= kept
            self._at = now


# The share of a tier's time, at most, that goes to loads that come later: they see this one, and many leave theirs.
MOST_BUSY = 0.3


class Turns:
    """What a tier offers now. `left_s` are the seconds of work that are left of each load under way, `rate` the loads a
    second that come behind, and `busy` the share of the time that loads have taken; `prices` the seconds for a byte and
    for a call, 0 while they are not known. A load that needs less than the others is over before them, so of each it
    waits for as much as it has itself."""

    def __init__(
        self,
        left_s: Iterable[float] = (),
        rate: float = 0.0,
        busy: float = 0.0,
        prices: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self._left = sorted(left_s)
        self._sums = [0.0, *accumulate(self._left)]
        self._rate = rate
        self._busy = min(busy, MOST_BUSY)
        self._prices = prices

    def work_s(self, nbytes: float, calls: float) -> float:
        """Return the seconds to load so many bytes in so many calls, without others."""
        return self._prices[0] * nbytes + self._prices[1] * calls

    def load_s(self, work_s: float) -> float:
        return (self._waited_s(work_s) + work_s) / (1.0 - self._busy)

    def cost_to_others(self, work_s: float) -> float:
        """Return the seconds that others wait longer, together, for a load of `work_s`: those under way, each as long
        as this one waits for it, and those that come before it is over, each by `work_s`."""
        wait_s = self._waited_s(work_s)
        return wait_s + work_s * self._rate * (wait_s + work_s)

    def _waited_s(self, work_s: float) -> float:
        shorter = bisect(self._left, work_s)
        return self._sums[shorter] + (len(self._left) - shorter) * work_s


# A tier from which nothing was loaded for so long gets a load that its price is against: it may be quick again.
PROBE_S = 15.0


@dataclass(slots=True, eq=False)
class Load:
    """A request's load from the tier: the bytes that wait for it, or are under way."""

    nbytes: int


class Call(NamedTuple):
    """A call that loads: its bytes, and when it began, by the tier's clock of charges and by the caller's."""

    nbytes: int
    charged: float
    began: float


class TierSpeed:
    """The speed of one tier: bytes a second, learned from finished loads, and the bytes that wait to be loaded. Not
    thread-safe. Loads that run at once share a tier: of a second in which two run, each is charged half. So bytes by
    charges are what the tier as a whole brings a second, whatever runs at once."""

    def __init__(self, now: float) -> None:
        self._loads: set[Load] = set()
        self._price = LearnedPrice()
        self._traffic = Traffic(now)
        self._running = 0
        # Seconds that a load charges which runs since the begin, and when that was last right.
        self._charged = 0.0
        self._at = now
        self._probed_at = now

    def begin(self, nbytes: int, now: float) -> Call:
        """Begin a call that loads so many bytes; `end` ends it."""
        self._charge(now)
        self._running += 1
        return Call(nbytes, self._charged, now)

    def end(self, call: Call, now: float, *, loaded: int) -> None:
        """End a call, which brought `loaded` bytes; nothing is learned from one that brought only a part."""
        self._charge(now)
        self._running -= 1
        if loaded == call.nbytes:
            self._price.add(max(self._charged - call.charged, 0.0), loaded, 1.0, began=call.began, now=now)

    def chosen(self, nbytes: int, now: float) -> Load:
        """Count a request that loads so many bytes, which wait until they are `gone`."""
        load = Load(nbytes)
        self._loads.add(load)
        self._traffic.add(now, work=nbytes)
        return load

    def gone(self, load: Load, nbytes: int) -> None:
        """So many bytes of a load wait no longer: they came, or were given up."""
        load.nbytes -= nbytes
        if load.nbytes <= 0:
            self._loads.discard(load)

    @property
    def queued_bytes(self) -> int:
        return sum(load.nbytes for load in self._loads)

    def prices(self) -> tuple[float, float] | None:
        """The seconds for a byte and for a call, None while that is not known."""
        return self._price.prices

    def turns(self, now: float) -> Turns:
        prices = self._price.prices
        if prices is None:
            return Turns()
        requests, nbytes = self._traffic.rates(now)
        return Turns([load.nbytes * prices[0] for load in self._loads], requests, nbytes * prices[0], prices)

    def probes(self, now: float) -> bool:
        """Whether a load is due although its price is against it; if so, the next one is in `PROBE_S`."""
        is_due = self.prices() is not None and now - max(self._price.last_at, self._probed_at) >= PROBE_S
        if is_due:
            self._probed_at = now
        return is_due

    def _charge(self, now: float) -> None:
        if self._running:
            self._charged += max(now - self._at, 0.0) / self._running
        self._at = max(now, self._at)


# Cuts that are priced at most: a microsecond or two each.
MOST_CUTS = 256


class TierPart(NamedTuple):
    """What one tier has of a hit: `load_s[i]` are the seconds in which it loads its part of the first `i` chunks that
    may be cut off; never less for more of them."""

    turns: Turns
    load_s: Sequence[float]

    def ready_s(self, count: int) -> float:
        """Return for how long the first `count` chunks wait for this tier."""
        return self.turns.load_s(self.load_s[count]) if self.load_s[count] else 0.0


class Priced(NamedTuple):
    """Of a hit of `found` chunks the first `chunks` are used. `load_s` and `compute_s` are the prices of the others,
    or, if there are none, of all that was not in L1: for how long the request waits for their load, and for how long it
    computes them. `saved_s` is what the cut spares, by these prices, the request and those behind it together."""

    chunks: int
    found: int
    load_s: float
    compute_s: float
    saved_s: float

    @property
    def is_cut(self) -> bool:
        return self.chunks < self.found


def cut(
    parts: Sequence[TierPart],
    engine: EngineSpeed,
    *,
    wait_s: float = 0.0,
    rate: float = 0.0,
    first: int,
    last: int,
    chunk_tokens: int,
) -> Priced:
    """Return where to cut a hit of which the tokens before `first` need no load, and of a prompt of `last` tokens.

    All `parts`, one at least, have the same length, the number of chunks that may be cut off and one more. Before the
    prompt the engine has `wait_s` of work, and `rate` requests a second come behind it.
    """
    chunks = len(parts[0].load_s) - 1

    def price(count: int) -> float:
        compute_s = engine.prefill_s(first + count * chunk_tokens, last)
        # Each that comes until the queue and this work are over waits for it; what comes later goes another way.
        ready_s, others_s = wait_s, compute_s * rate * (wait_s + compute_s)
        for part in parts:
            ready_s = max(ready_s, part.ready_s(count))
            others_s += part.turns.cost_to_others(part.load_s[count])
        return ready_s + compute_s + others_s

    # The longest first, so that it wins among equal ones.
    counts = [*range(chunks, 0, -max(-(-chunks // MOST_CUTS), 1)), 0]
    prices = [price(count) for count in counts]
    least = min(prices)
    best = counts[prices.index(least)]
    begin = best if best < chunks else 0
    load_s = max(part.ready_s(chunks) - part.ready_s(begin) for part in parts)
    compute_s = engine.prefill_s(first + begin * chunk_tokens, first + chunks * chunk_tokens)
    return Priced(best, chunks, load_s, compute_s, prices[0] - least)
