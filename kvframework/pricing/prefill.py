"""How long an engine takes to compute a part of a prompt, and what an engine says of itself with a LOOKUP. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Annotated

import msgspec

from kvframework.api.types import Message

# A price that is learned from finished work: seconds for each unit of one or two kinds. Pure, with the caller's clock.
#
# The mean over the last `horizon_s` seconds, weighted by work, and robust: a sample counts as at most `CLIP` times more
# or less than expected, and never for more than `MOST_SHARE` of the mean, so one that was taken on a paused machine
# makes usual work dearer by 1.75 at most. Where three samples in a row surprise in the same direction, each begun after
# the one before was known, they are believed, and the price is their median: a change is learned at once, and a pause,
# which spoils all that is under way at the same time, is one surprise, of which only the first sample is learned.

CLIP = 4.0
MOST_SHARE = 0.25
# The ratio to what was expected from which on a sample is a surprise.
SURPRISE = 2.0
# Samples before anything is known, and surprises before they are believed.
SEEDS = 3
# Seconds for a unit, of whatever kind, and the amounts and times that can be true.
LEAST, MOST = 1e-15, 1e6
LEAST_WORK, MOST_WORK = 1e-3, 1e18
MOST_S = 1e6
# What the last sample counts in the mean of a usual one.
USUAL = 1 / 8


class LearnedPrice:
    """`seconds = first * prices[0] + second * prices[1]`, both prices never negative. Samples with other mixes of
    the two kinds distinguish them, by least squares; as long as all are alike the second kind costs nothing. Not
    thread-safe."""

    __slots__ = (
        "_direction",
        "_horizon_s",
        "_mass",
        "_moments",
        "_prices",
        "_seeds",
        "_surprised_at",
        "_surprises",
        "_usual",
        "last_at",
    )

    def __init__(self, horizon_s: float = 60.0) -> None:
        self._horizon_s = horizon_s
        self._seeds: list[tuple[float, float, float]] = []
        self._prices: tuple[float, float] | None = None
        # The weighted means of first * first, first * second, second * second, first * seconds, second * seconds.
        self._moments = [0.0] * 5
        # The expected seconds of the work in the mean, those of `horizon_s` ago counting 1 / e; and of a usual sample.
        self._mass = self._usual = 0.0
        # The last surprises in a row, their direction, and when the last of them was known.
        self._surprises: list[tuple[float, float, float]] = []
        self._direction = 0
        self._surprised_at = 0.0
        self.last_at = -math.inf

    @property
    def prices(self) -> tuple[float, float] | None:
        """The seconds for a unit of each kind, None before the first `SEEDS` samples."""
        return self._prices

    def expected(self, first: float, second: float = 0.0) -> float | None:
        """Return the seconds that this work takes, None as long as that is not known."""
        if self._prices is None:
            return None
        return self._prices[0] * first + self._prices[1] * second

    def add(self, seconds: float, first: float, second: float = 0.0, *, began: float, now: float) -> None:
        """Learn from work that took `seconds` and has ended `now`. What cannot be true is ignored."""
        if not (LEAST_WORK <= first <= MOST_WORK and 0 <= second <= MOST_WORK and 0 <= seconds <= MOST_S):
            return
        now = max(now, self.last_at)
        if self._prices is None:
            self.last_at = now
            self._seed(seconds, first, second)
            return
        kept = math.exp((self.last_at - now) / self._horizon_s)
        self.last_at = now
        if self._is_echo(seconds, first, second, began):
            return
        if self._is_believed(seconds, first, second, now):
            self._begin_anew()
            return
        # However long ago, the past is as much as makes `MOST_SHARE` of a usual sample.
        self._mass = max(self._mass * kept, self._usual * (1 / MOST_SHARE - 1))
        expected = self._expected(first, second)
        self._learn(seconds, first, second, min(expected / (self._mass + expected), MOST_SHARE))

    def _seed(self, seconds: float, first: float, second: float) -> None:
        self._seeds.append((seconds, first, second))
        if len(self._seeds) < SEEDS:
            return
        self._prices = (_bounded(median(seconds / first for seconds, first, _ in self._seeds)), 0.0)
        self._usual = median(self._expected(first, second) for _, first, second in self._seeds)
        self._mass = self._usual
        for number, each in enumerate(self._seeds, 1):
            self._learn(*each, 1 / number)
        self._seeds = []

    def _learn(self, seconds: float, first: float, second: float, share: float) -> None:
        expected = self._expected(first, second)
        ratio = min(max(seconds / expected, 1 / CLIP), CLIP)
        self._mass /= 1.0 - min(share, MOST_SHARE)
        self._usual += (min(expected / self._usual, CLIP) - 1) * self._usual * USUAL
        # Work counts by its seconds: so the expected sum of all is their sum.
        first, second = first / expected, second / expected
        sample = (first * first, first * second, second * second, first * ratio, second * ratio)
        self._moments = [old * (1 - share) + new * share for old, new in zip(self._moments, sample, strict=True)]
        self._prices = self._solved()

    def _expected(self, first: float, second: float) -> float:
        assert self._prices is not None
        return self._prices[0] * first + self._prices[1] * second

    def _is_echo(self, seconds: float, first: float, second: float, began: float) -> bool:
        """Return whether this repeats the last surprise: it was under way when that one ended."""
        return began < self._surprised_at and self._surprise(seconds, first, second) == self._direction != 0

    def _is_believed(self, seconds: float, first: float, second: float, now: float) -> bool:
        """Whether this is the last of the surprises in a row that are believed."""
        direction = self._surprise(seconds, first, second)
        if direction != self._direction:
            self._direction = direction
            self._surprises = []
        if direction:
            self._surprises.append((seconds, first, second))
            self._surprised_at = now
        return len(self._surprises) >= SEEDS

    def _surprise(self, seconds: float, first: float, second: float) -> int:
        """Return the direction in which this is a surprise, 0 if it is none."""
        ratio = seconds / self._expected(first, second)
        return 1 if ratio > SURPRISE else -1 if ratio * SURPRISE < 1 else 0

    def _begin_anew(self) -> None:
        """Take the level of the surprises in the place of the past's, whose ratio of the kinds stays."""
        assert self._prices is not None
        level = median(seconds / self._expected(first, second) for seconds, first, second in self._surprises)
        level = max(level, LEAST)
        self._surprises, self._direction = [], 0
        self._prices = _bounded(self._prices[0] * level), min(self._prices[1] * level, MOST)
        aa, ab, bb, ay, by = self._moments
        self._moments = [aa / level**2, ab / level**2, bb / level**2, ay / level, by / level]
        self._usual = max(self._usual * level, LEAST)
        self._mass = self._usual

    def _solved(self) -> tuple[float, float]:
        """Return the least squares of the moments."""
        assert self._prices is not None
        aa, ab, bb, ay, by = self._moments
        determinant = aa * bb - ab * ab
        if determinant > 1e-6 * aa * bb:
            first, second = (ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant
            if first > 0 and second >= 0:
                return _bounded(first), min(second, MOST)
            if second > 0 and by / bb > 0:
                # The first kind alone must not be free: what is not told apart keeps its ratio.
                return self._scaled(aa, ab, bb, ay, by)
            return _bounded(ay / aa), 0.0
        return self._scaled(aa, ab, bb, ay, by)

    def _scaled(self, aa: float, ab: float, bb: float, ay: float, by: float) -> tuple[float, float]:
        """Return prices of the present ratio that fit best."""
        assert self._prices is not None
        first, second = self._prices
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
        self._ended = -float("inf")

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
