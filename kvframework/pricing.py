"""Load or recompute: how fast engines compute and tiers load, where a hit is cut; what tenants load. Pure, no lock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import median
from typing import Annotated, NamedTuple

import msgspec

from kvframework.api.plugin import ByteSize, Message

# The samples that make a price, and those before which there is none.
RECENT, SEEDS = 9, 3
# The most that work can take, or an engine can have to do.
MOST_S = 1e6


class LearnedPrice:
    """`seconds = first * prices[0] + second * prices[1]`, the line of medians (Theil and Sen) through the last samples:
    a few absurd ones decide nothing. `prices` is None before the first `SEEDS`. While all samples have the same mix of
    both kinds, the second one costs nothing."""

    def __init__(self) -> None:
        self.prices: tuple[float, float] | None = None
        self.samples: deque[tuple[float, float]] = deque(maxlen=RECENT)

    def add(self, seconds: float, first: float, second: float = 0.0) -> None:
        """Learn from work that took so long. What cannot be true is ignored."""
        if first > 0 and 0 <= seconds <= MOST_S:
            self.samples.append((second / first, max(seconds, 1e-9) / first))
            if len(self.samples) >= (SEEDS if self.prices is None else 1):
                self.prices = self._line()

    def _line(self) -> tuple[float, float]:
        pairs = combinations(sorted(self.samples), 2)
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if b[0] > 2 * a[0]]
        slope = max(median(slopes), 0.0) if slopes else 0.0
        least = median([each for _, each in self.samples]) / 100
        return max(median([each - slope * mix for mix, each in self.samples]), least), slope


class EngineSpeed(Message, frozen=True):
    """The speed of an engine: `tokens_per_s` of prefill without a context; `attention_tokens`, the length of a context
    at which a token takes twice as long, 0 if the context does not matter; `queued_s`, the seconds of prefill that the
    engine has besides this request, also of prompts that wait and are not looked up yet: it computes those while a load
    is under way. A decoder refuses numbers that are out of bounds or not finite, as `check` does."""

    tokens_per_s: Annotated[float, msgspec.Meta(ge=1e-3, le=1e12)]
    attention_tokens: Annotated[float, msgspec.Meta(ge=0.0, le=1e12)] = 0.0
    queued_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 0.0

    def check(self) -> None:
        """Raise `ValueError` for numbers that are out of bounds or not finite."""
        msgspec.convert(msgspec.structs.asdict(self), EngineSpeed)

    def prefill_s(self, first: int, last: int) -> float:
        """Return the seconds to compute the tokens `[first, last)` of a prompt whose first tokens are there."""
        tokens, area = _work([(first, last)])
        return (tokens + (area / self.attention_tokens if self.attention_tokens >= 1.0 else 0.0)) / self.tokens_per_s


def _work(parts: Iterable[tuple[int, int]]) -> tuple[int, float]:
    """Return the tokens to be computed, and the sum of their contexts in tokens squared."""
    tokens, area = 0, 0.0
    for first, last in parts:
        tokens += last - first
        area += (last - first) * (last + first) / 2
    return tokens, area


# A request with fewer tokens in a step generates, or ends its prompt: that says nothing of prefill.
LEAST_TOKENS = 32


class PrefillMeter:
    """The speed of one engine. Each step begins and ends; of several under way the first one ends first. What a step
    computes beside prompts makes it slower, as it does for the next prompt. A part of a prompt is two numbers of
    tokens: those that are there, and these with those that are to be computed. Not thread-safe."""

    def __init__(self) -> None:
        self._price = LearnedPrice()
        # When each step under way began, and its tokens and the sum of their contexts; 0 tokens: it says nothing.
        self._steps: deque[tuple[float, int, float]] = deque(maxlen=16)
        self._ended = -math.inf

    def begin_step(self, parts: Iterable[tuple[int, int]], now: float, *, counts: bool = True) -> None:
        """A step begins that computes these parts of prompts; unless it `counts` its time is not that of computing."""
        prefills = [part for part in parts if counts and part[1] - part[0] >= LEAST_TOKENS]
        self._steps.append((now, *_work(prefills)) if prefills else (now, 0, 0.0))

    def end_step(self, now: float) -> None:
        """The first step that is under way has ended."""
        if self._steps:
            began, tokens, area = self._steps.popleft()
            # One that began during another waited for that.
            since, self._ended = max(began, self._ended), now
            if tokens:
                self._price.add(now - since, tokens, area)

    def speed(self, queued: Iterable[tuple[int, int]]) -> EngineSpeed | None:
        """Return what the engine may say with a LOOKUP, behind `queued` parts; None while its speed is not known."""
        if self._price.prices is None:
            return None
        token_s, context_s = self._price.prices
        tokens, area = _work(part for part in queued if part[0] < part[1])
        attention = token_s / context_s if context_s * 1e12 > token_s else 0.0
        queued_s = min(token_s * tokens + context_s * area, MOST_S)
        return EngineSpeed(min(max(1 / token_s, 1e-3), 1e12), attention, queued_s)


# A tier from which nothing was loaded for so long gets a load that its price is against: it may be quick again.
PROBE_S = 15.0


class TierSpeed:
    """The speed of one tier: its price of a byte and of a call, of finished calls, and the bytes that wait to be
    loaded, which whoever chooses and ends loads counts. Calls that run at once share a tier: of a second in which two
    run, each is charged half. Not thread-safe."""

    def __init__(self, now: float) -> None:
        self.price = LearnedPrice()
        self.queued_bytes = 0
        self._running = 0
        self._charged = 0.0  # what a call is charged that runs since the begin, as of `_at`
        self._at = self._loaded_at = now
        self._probing = False

    def begin(self, now: float) -> float:
        """Begin a call that loads; return what `end` takes."""
        self._charge(now, 1)
        return self._charged

    def end(self, began: float, now: float, nbytes: int) -> None:
        """End a call, which brought so many bytes, 0 if not all that it asked for: nothing is learned from that."""
        self._charge(now, -1)
        if nbytes:
            if self._probing:
                self.price.samples.clear()
            self._probing, self._loaded_at = False, now
            self.price.add(self._charged - began, nbytes, 1.0)

    def load_s(self, nbytes: float, calls: float) -> float:
        """Return the seconds until so many bytes have come, in so many calls, behind all others; 0 without a price."""
        byte_s, call_s = self.price.prices or (0.0, 0.0)
        return (self.queued_bytes + nbytes) * byte_s + calls * call_s if nbytes else 0.0

    def probes(self, now: float) -> bool:
        """Whether a load is due against its price; it alone is the price then, and the next one is due in `PROBE_S`."""
        if self.price.prices is None or now - self._loaded_at < PROBE_S:
            return False
        self._loaded_at, self._probing = now, True
        return True

    def _charge(self, now: float, calls: int) -> None:
        self._charged += max(now - self._at, 0.0) / max(self._running, 1)
        self._at = max(now, self._at)
        self._running += calls


class Priced(NamedTuple):
    """Of a hit of `found` chunks the first `chunks` are used. `load_s` and `compute_s` are how long the load and the
    computation of the others take, or, if there are none, of all that was not in L1; `saved_s` is what the cut spares.
    """

    chunks: int
    found: int
    load_s: float
    compute_s: float
    saved_s: float


def cut(chunks: Sequence[int], load_s: Sequence[float], compute_s: Sequence[float], wait_s: float = 0.0) -> Priced:
    """Return where to cut a hit: of `chunks`, which ascend from those in L1 to all that was found, the one with the
    least `max(load_s, wait_s) + compute_s`, of equal ones the longest. `load_s` is how long its load takes, `compute_s`
    how long the rest of the prompt is computed then, behind `wait_s` of other work of the engine."""
    totals = [max(load, wait_s) + compute for load, compute in zip(load_s, compute_s, strict=True)]
    least = min(totals)
    best = len(totals) - 1 - totals[::-1].index(least)
    begin = best if best < len(totals) - 1 else 0
    load, compute = load_s[-1] - load_s[begin], compute_s[begin] - compute_s[-1]
    return Priced(chunks[best], chunks[-1], load, compute, totals[-1] - least)


# Seconds of its rate that a tenant may load at once, and for which a load may wait; and its loads that are under way.
BURST_S, WAIT_S, MOST_LOADS = 1.0, 2.0, 32


class LoadRate:
    """The token bucket of the loads of one tenant. What is granted is charged at once, also beyond what the bucket
    holds: then later grants wait for it, `WAIT_S` at most. `paid` is what lookups were charged for, without what was
    copied since; it is remembered for `lasts_s`, as long as a ticket lasts."""

    def __init__(self, bytes_per_s: float, lasts_s: float = math.inf) -> None:
        self.bytes_per_s = bytes_per_s
        self.loads, self.paid, self._left, self._at = 0, 0.0, 0.0, -math.inf
        self._most_paid = bytes_per_s * (lasts_s + BURST_S + WAIT_S)

    def room(self, now: float) -> float:
        """Return the bytes that may still be granted; 0 or less: none."""
        self._left = min(self._left + max(now - self._at, 0.0) * self.bytes_per_s, self.bytes_per_s * BURST_S)
        self._at = max(now, self._at)
        return self._left + self.bytes_per_s * WAIT_S

    def take(self, nbytes: float, now: float) -> float:
        """Grant a lookup so many bytes; return when their first may be loaded. The others follow at the rate."""
        begin = now + WAIT_S - self.room(now) / self.bytes_per_s
        self._left -= nbytes
        self.paid = min(self.paid + nbytes, self._most_paid)
        return begin

    def may_copy(self, nbytes: float, now: float) -> bool:
        """Whether so many bytes may be copied now: a lookup was charged for them, or they can still be granted."""
        return nbytes <= self.paid or self.room(now) > 0

    def copied(self, nbytes: float) -> None:
        """Charge for so many bytes, as far as no lookup was."""
        self._left -= max(nbytes - self.paid, 0.0)
        self.paid = max(self.paid - nbytes, 0.0)

    def __str__(self) -> str:
        return f"the tenant loads at most {ByteSize(int(self.bytes_per_s))}/s"
