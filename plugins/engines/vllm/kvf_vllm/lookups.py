"""The scheduler's requests to the server: one request's digests, its lookups and their tickets.

Scheduler process, scheduler thread. A lookup waits for its deadline at most; failures are misses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvf_vllm.step_messages import Served
from kvframework.api.keys import Retain
from kvframework.client import EngineSpeed, KVClient, LoadGrant, LookupResult, RequestHashes, SchedulerAdapter
from kvframework.errors import KVFrameworkError


@dataclass(frozen=True)
class StagedResult(LookupResult):
    """The results of all pipeline stages for `request` from token `start`: tokens that all of them have. Its `ticket`
    only says whether there is one."""

    parts: Sequence[LookupResult] = ()
    request: RequestHashes | None = None
    speed: EngineSpeed | None = None

    def take_grants(self) -> tuple[LoadGrant, ...]:
        return tuple(each for part in self.parts for each in part.take_grants())


class ServerLookups:
    """Lookups over a `KVClient`, which is borrowed. A prefix is a hit as far as every stage has it, and can end it
    there: a window or a state makes what a stage has of a shorter prefix another question."""

    def __init__(self, client: KVClient) -> None:
        self._client = client
        self._chunk_tokens = 0
        self._adapters: Sequence[SchedulerAdapter] = ()

    def serve(self, served: Sequence[Served]) -> None:
        """Set the names of content that the workers use, one for each pipeline stage. Called before any lookup."""
        self._chunk_tokens = served[0].chunk_tokens
        self._adapters = [
            SchedulerAdapter(
                self._client,
                model_name=each.model_name,
                namespace=each.namespace,
                chunk_tokens=each.chunk_tokens,
                world_size=each.world_size,
                instances=each.instances,
            )
            for each in served
        ]

    def hashes(
        self, request_id: str, salt: str, trace: str = "", retain: Sequence[Retain] = (), conversation: str = ""
    ) -> RequestHashes | None:
        """A new empty digest list; `trace` is the request's traceparent, `retain` what it says of its KV's future,
        `conversation` what it is a part of. None as long as the server has never been reached."""
        # Only `usable` guarantees that no call waits for a first handshake.
        if not self._adapters or not self._client.usable:
            return None
        try:
            hasher = self._client.hasher
        except KVFrameworkError:
            return None
        return RequestHashes(
            hasher,
            self._chunk_tokens,
            request_id=request_id,
            cache_salt=salt,
            trace=trace,
            retain=retain,
            conversation=conversation,
        )

    def tells(self, salt: str) -> bool:
        """True if the server tells routers of prompts with this salt, and so wants their content."""
        return self._client.wants_tokens(salt)

    def lookup(
        self, request: RequestHashes, start: int, end: int, wait_s: float = 0.0, speed: EngineSpeed | None = None
    ) -> LookupResult:
        """Look up tokens `[start, end)`, and wait `wait_s` at most for L2 to say whether it has more than L1. `speed`
        is this engine's, as far as it is known."""
        serving = self._serving()
        # All stages together hold up the scheduler for no longer than one.
        wait_s /= len(serving)
        parts = [each.lookup(request, start, end, wait_s=wait_s, speed=speed) for each in serving]
        return self._agreed(request, start, parts, speed)

    def poll(self, result: LookupResult) -> LookupResult:
        if not isinstance(result, StagedResult):
            return self._serving()[0].poll(result)
        assert result.request is not None
        parts = [each.poll(part) for each, part in zip(self._serving(), result.parts, strict=True)]
        return self._agreed(result.request, result.start, parts, result.speed)

    def free(self, result: LookupResult) -> None:
        if not isinstance(result, StagedResult):
            self._serving()[0].free(result)
            return
        for each, part in zip(self._serving(), result.parts, strict=True):
            each.free(part)

    def _agreed(
        self, request: RequestHashes, start: int, parts: list[LookupResult], speed: EngineSpeed | None
    ) -> LookupResult:
        """One result for all stages. Those that have more than another are asked again for no more than that, until
        all have the same; not before each has answered."""
        while not any(part.pending for part in parts) and len({part.hit_tokens for part in parts}) > 1:
            shortest = min(part.hit_tokens for part in parts)
            for index, (each, part) in enumerate(zip(self._serving(), parts, strict=True)):
                if part.hit_tokens > shortest:
                    # Asked before the other is let go, which pins what it shares with it.
                    end = start + shortest
                    parts[index] = each.lookup(request, start, end, speed=speed) if shortest else LookupResult(0)
                    each.free(part)
        return _together(parts, request, start, speed)

    def _serving(self) -> Sequence[SchedulerAdapter]:
        assert self._adapters, "a lookup needs an earlier call of serve()"
        return self._adapters


def _together(
    parts: Sequence[LookupResult], request: RequestHashes, start: int, speed: EngineSpeed | None
) -> LookupResult:
    if len(parts) == 1:
        return parts[0]
    hit = min(part.hit_tokens for part in parts)
    ticket = next((part.ticket for part in parts if part.ticket), "")
    asked = max(part.asked_tokens for part in parts)
    pending = any(part.pending for part in parts)
    unanswered = any(part.unanswered for part in parts)
    return StagedResult(
        hit, ticket, pending, asked, start, unanswered=unanswered, parts=parts, request=request, speed=speed
    )
