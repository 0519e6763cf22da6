"""How long an engine takes to compute a part of a prompt, and what an engine says of itself with a LOOKUP. Pure."""

from __future__ import annotations

from math import isfinite

from kvframework.api.types import Message

# Beyond these bounds a number is a mistake of its sender.
LEAST_TOKENS_PER_S, MOST_TOKENS_PER_S = 1e-3, 1e12
LEAST_ATTENTION_TOKENS, MOST_ATTENTION_TOKENS = 1.0, 1e12
MOST_QUEUED_S = 1e6


class EngineSpeed(Message, frozen=True):
    """The speed of an engine: `tokens_per_s` of prefill without a context; `attention_tokens`, the length of a context
    at which a token takes twice as long, 0 if the context does not matter; `queued_s`, the seconds of prefill that come
    before this request. Raises `ValueError` for numbers that are not finite or out of bounds."""

    tokens_per_s: float
    attention_tokens: float = 0.0
    queued_s: float = 0.0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("tokens_per_s", LEAST_TOKENS_PER_S, MOST_TOKENS_PER_S),
            ("attention_tokens", LEAST_ATTENTION_TOKENS if self.attention_tokens else 0.0, MOST_ATTENTION_TOKENS),
            ("queued_s", 0.0, MOST_QUEUED_S),
        ):
            value = getattr(self, name)
            if not (isfinite(value) and least <= value <= most):
                raise ValueError(f"{name} is {value}, expected {least:g} to {most:g}")

    def prefill_s(self, first: int, last: int) -> float:
        """Return the seconds to compute the tokens `[first, last)` of a prompt."""
        return prefill_s(first, last, self.tokens_per_s, self.attention_tokens)


def prefill_s(first: int, last: int, tokens_per_s: float, attention_tokens: float = 0.0) -> float:
    """Return `C(first, last)`, the seconds to compute the tokens `[first, last)` of a prompt whose first tokens are
    there: each takes `1 / tokens_per_s`, and as much again for every `attention_tokens` of context, 0 for none."""
    tokens = float(last - first)
    if attention_tokens:
        tokens += context_area(first, last) / attention_tokens
    return tokens / tokens_per_s


def context_area(first: int, last: int) -> float:
    """Return the sum of the contexts of the tokens `[first, last)`, in tokens squared."""
    return (last - first) * (last + first) / 2
