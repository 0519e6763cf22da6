"""How fast an engine computes prompts, learned from its steps. Pure, with the caller's clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvframework.pricing.prefill import EngineSpeed, context_area
from kvframework.pricing.rates import LearnedPrice

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
