"""The search for one request's prefix in the server: lookups, polls while L2 loads, a deadline, and the ticket that
pins the hit. A pure state machine over `ServerLookups`; takes a clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvf_vllm.lookups import ServerLookups
from kvframework.client import EngineSpeed, LoadGrant, LookupResult, RequestHashes

# The scheduler may ask about a request at every step for as long as it has no room for it.
POLL_S = 0.002
MISS_HOLDS_S = 0.5
# Well before the server's default of 60 s ends a ticket.
TICKET_HOLDS_S = 20.0


class PrefixSearch:
    """One search, with at most one ticket at a time, which `release` ends. `found_after_s` is the duration of the last
    lookup."""

    def __init__(self, service: ServerLookups, *, deadline_s: float, clock: Callable[[], float]) -> None:
        self.found_after_s = 0.0
        self._service = service
        self._deadline_s = deadline_s
        self._clock = clock
        self._result: LookupResult | None = None
        self._start = 0
        self._asked_at = 0.0
        self._polled_at = 0.0

    def hit_end(
        self,
        hashes: RequestHashes,
        start: int,
        end: int,
        wait_s: float = 0.0,
        speed: Callable[[], EngineSpeed | None] = lambda: None,
    ) -> int | None:
        """The token up to which the server has all chunks from `start` (a multiple of the chunk), None while L2 loads:
        call again. The hit stays pinned until `release` or another `start`. A lookup waits for L2 for `wait_s`, and
        says how fast the engine is then."""
        now = self._clock()
        if self._result is None or self._start != start or self._is_stale(now):
            self.release()
            self._start, self._asked_at, self._polled_at = start, now, now
            self._result = self._service.lookup(hashes, start, end, wait_s, speed())
            self.found_after_s = self._clock() - now
        if self._result.pending:
            if now - self._asked_at < self._deadline_s:
                if now - self._polled_at >= POLL_S:
                    self._polled_at = now
                    self._result = self._service.poll(self._result)
                if self._result.pending:
                    return None
                self.found_after_s = self._clock() - self._asked_at
            else:
                # The hit in L1 is enough. A load that goes on fills L1 for later requests.
                self._result = self._service.poll(self._result)
                self._result = replace(self._result, pending=False)
                if not self._result.hit_tokens:
                    self.give_up()
        return start + self._result.hit_tokens

    @property
    def unanswered(self) -> bool:
        """Whether the last lookup is a miss since the server gave no answer in time."""
        return self._result is not None and self._result.unanswered

    def take_grants(self) -> tuple[LoadGrant, ...]:
        """The loads of the hit that are prepared, once; they go on after `release`."""
        return () if self._result is None else self._result.take_grants()

    def give_up(self) -> None:
        """Release the hit and treat it as a miss, for as long as a miss holds. Idempotent."""
        if self._result is not None:
            result, self._result = self._result, LookupResult(0)
            if result.ticket:
                self._service.free(result)

    def release(self) -> None:
        """Release the hit; the next call asks the server. Idempotent."""
        self.give_up()
        self._result = None

    def _is_stale(self, now: float) -> bool:
        assert self._result is not None
        holds = TICKET_HOLDS_S if self._result.hit_tokens or self._result.pending else MISS_HOLDS_S
        return now - self._asked_at >= max(holds, self._deadline_s if self._result.pending else 0.0)
