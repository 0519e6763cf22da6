"""How long an engine takes to compute a part of a prompt, and what an engine says of itself with a LOOKUP. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvframework.api.types import Message


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
