"""How fast an engine computes prompts, and what it has still to compute: a lookup says so, and the server loads only
what comes sooner. Pure; takes a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvf_vllm.requests import EngineRequest
from kvframework.client import EngineSpeed, PrefillMeter

MOST_S = 1e6


class Waiting:
    """The prompts that have come to vLLM, and that its scheduler has not asked for yet: their numbers of tokens, by
    request."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._sum = self._squares = 0

    def came(self, request_id: str, tokens: int) -> None:
        self.gone(request_id)
        self._tokens[request_id] = tokens
        self._sum += tokens
        self._squares += tokens * tokens

    def gone(self, request_id: str) -> None:
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


class Prefill:
    """The prefill of one engine. A request comes, is asked for, gets its blocks and with them the tokens up to
    `hit_end`, and ends. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._meter = PrefillMeter()
        self._waiting = Waiting()
        # With the end of its hit.
        self._running: dict[str, tuple[EngineRequest, int]] = {}

    def came(self, request: EngineRequest) -> None:
        if request.request_id not in self._running:
            self._waiting.came(request.request_id, request.num_tokens)

    def asked_for(self, request_id: str) -> None:
        self._waiting.gone(request_id)

    def has_blocks(self, request: EngineRequest, hit_end: int = 0) -> None:
        before = self._running.get(request.request_id, (request, 0))[1]
        self._running[request.request_id] = request, max(hit_end, before)

    def ended(self, request_id: str) -> None:
        self._waiting.gone(request_id)
        self._running.pop(request_id, None)

    def __contains__(self, request_id: str) -> bool:
        """Whether the request has blocks."""
        return request_id in self._running

    def __bool__(self) -> bool:
        """Whether any request has blocks."""
        return bool(self._running)

    def begin_step(self, scheduled: Mapping[str, int], *, counts: bool = True, now: float | None = None) -> None:
        """A step begins that computes so many tokens of each request; `counts`: its time is that of computing."""
        computed: Sequence[tuple[int, int]] = ()
        # One token is no part of a prompt that says anything.
        if sum(scheduled.values()) > len(scheduled):
            parts = [(self._running[each][0], n) for each, n in scheduled.items() if n > 1 and each in self._running]
            computed = [(each.num_computed_tokens, each.num_computed_tokens + n) for each, n in parts]
        self._meter.begin_step(computed, now or self._clock(), counts=counts)

    def end_step(self, now: float | None = None) -> None:
        self._meter.end_step(now or self._clock())

    def takes_s(self, start: int, end: int) -> float:
        """Return how long the engine computes these tokens of a prompt, 0.0 as long as nothing is known."""
        speed = self._meter.speed([(start, end)])
        return 0.0 if speed is None else speed.queued_s

    def speed(self) -> EngineSpeed | None:
        """Return what the engine still computes before the next prompt: the prompts that it has begun, and those that
        wait, which it computes while a load is under way."""
        queued = [
            (max(request.num_computed_tokens, hit_end), request.num_tokens)
            for request, hit_end in self._running.values()
        ]
        speed = self._meter.speed(queued)
        return None if speed is None else self._waiting.behind(speed)
