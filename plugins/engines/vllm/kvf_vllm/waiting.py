"""The prompts that have come to vLLM, and that its scheduler has not asked for yet. Pure; every call is O(1)."""

from __future__ import annotations

import msgspec

from kvframework.client import EngineSpeed

MOST_S = 1e6


class Waiting:
    """Their numbers of tokens, by request."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._sum = self._squares = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def came(self, request_id: str, tokens: int) -> None:
        self.gone(request_id)
        self._tokens[request_id] = tokens
        self._sum += tokens
        self._squares += tokens * tokens

    def gone(self, request_id: str) -> None:
        """It is asked for, or has ended."""
        tokens = self._tokens.pop(request_id, 0)
        self._sum -= tokens
        self._squares -= tokens * tokens

    def behind(self, speed: EngineSpeed) -> EngineSpeed:
        """Return the speed with the prefill of all of these as well, as if none of them had a hit."""
        if not self._tokens:
            return speed
        context = self._squares / (2 * speed.attention_tokens) if speed.attention_tokens else 0.0
        queued_s = speed.queued_s + (self._sum + context) / speed.tokens_per_s
        return msgspec.structs.replace(speed, queued_s=min(queued_s, MOST_S))
