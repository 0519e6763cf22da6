"""How long an engine takes to compute a part of a prompt, and what an engine says of itself with a LOOKUP. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Annotated

import msgspec

from kvframework.api.types import Message
from kvframework.pricing.rates import LearnedPrice


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
