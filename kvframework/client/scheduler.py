"""The scheduler side of an engine integration: lookups and their tickets. No tensors, no torch.

Called from the scheduler's thread: a lookup waits for its deadline at most, other calls for `engine_s` (`wait` has its
own), and any failure is a miss, one log line and a count."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvframework.api.futures import Future
from kvframework.api.installing import warn_of_missing_kernels
from kvframework.api.keys import CacheKey
from kvframework.api.transport import LoadGrant, error_code
from kvframework.client.hashing import Grants, RequestHashes, grants_of
from kvframework.client.kv_client import KVClient, checked_start
from kvframework.errors import KVFrameworkError, LeaseUnknown, ProtocolError, ServerGone
from kvframework.logs.limit import LogLimit
from kvframework.pricing import EngineSpeed
from kvframework.wire import messages as m
from kvframework.wire.messages import MAX_GRANTS
from kvframework.wire.protocol import SINCE_0_3

log = logging.getLogger(__name__)
log.addFilter(LogLimit())

# Pause before the next question to a server that does not hold an answer back, or that did not answer.
POLL_S = 0.002
# Longest time that one lookup is held back.
HELD_S = 0.5
_ALL = 1 << 62
# After a long wait in vain lookups wait `lookup_s` alone, for so many times as long as it took: a server that seems to
# be back again and again takes a tenth of an engine's time at most.
_BRIEF_AFTER_VAIN = 10


@dataclass(frozen=True)
class LookupResult:
    """The result of a lookup: `hit_tokens` from its `start`, at most `asked_tokens`, are pinned under `ticket` ("" for
    none). `pending`: L2 has not answered yet. `grants` are the server's grants for loads of the whole hit, `key` the
    key of the lookup, with its salt. `unanswered`: a miss because the server did not answer in time."""

    hit_tokens: int
    ticket: str = ""
    pending: bool = False
    asked_tokens: int = 0
    start: int = 0
    grants: Grants = field(default_factory=Grants, compare=False, repr=False)
    key: CacheKey | None = field(default=None, compare=False, repr=False)
    unanswered: bool = False

    def take_grants(self) -> tuple[LoadGrant, ...]:
        """Return the grants, once, for workers in other processes or clients, whose `RequestHashes` take them; the
        lookup may then be freed while they load. In this process the request that was looked up already has them."""
        return self.grants.take_all()


MISS = LookupResult(0)
UNANSWERED = LookupResult(0, unanswered=True)


class SchedulerAdapter:
    """Lookups for all ranks of one namespace. Thread-safe."""

    def __init__(
        self,
        client: KVClient,
        *,
        model_name: str,
        namespace: bytes,
        chunk_tokens: int | None = None,
        world_size: int = 1,
        instances: Sequence[int] = (),
    ) -> None:
        """Without `chunk_tokens` (None) the constructor asks the server, which blocks and raises as
        `KVClient.chunk_tokens` does. `instances` are the ids of the workers on this node, in any process: if the server
        can, a hit contains a load grant for each of them, see `LookupResult.take_grants`."""
        warn_of_missing_kernels()
        self.failures = 0
        self._brief_until = -math.inf
        self.chunk_tokens = client.chunk_tokens(namespace) if chunk_tokens is None else chunk_tokens
        self._client = client
        self._model_name = model_name
        self._namespace = namespace
        self._world_size = world_size
        self._instances = tuple(instances[:MAX_GRANTS])

    def lookup(
        self,
        request: RequestHashes,
        start: int = 0,
        end: int | None = None,
        *,
        wait_s: float = 0.0,
        speed: EngineSpeed | None = None,
        ahead: bool = False,
    ) -> LookupResult:
        """Return how many tokens after `start` all ranks can load. `end` (default: all hashed tokens) is rounded down
        to a chunk. Raises `BadRange` unless `start` is a multiple of it.

        With `wait_s` the server delays its answer, by at most so many seconds, until L2 has said whether it has more
        than L1: a result that is not pending is then final. The answer does not wait for loads. With the engine's
        `speed` a server with `[server] price` finds fewer tokens if the engine computes the rest sooner than a tier
        loads it. `ValueError` for an impossible speed. The lookup waits as long as the engine would compute the tokens,
        within the bounds of `ClientDeadlines.of_lookup`; for a while after an unanswered lookup, only `lookup_s`. A
        lookup `ahead` of its request is not counted, and what it loads from L2 waits for the loads of all others."""
        start = checked_start(request.request_id, start, self.chunk_tokens)
        last = request.hashed_tokens if end is None else min(end, request.hashed_tokens)
        last -= last % self.chunk_tokens
        if last <= start:
            return MISS
        key = request.key(self._model_name, self._namespace, start, last, self._world_size)
        client, held_s = self._client, self._held_s(wait_s)
        prefill_s = (last - start) / client.deadlines.lookup_tokens_per_s
        if speed is not None:
            speed.check()
            prefill_s = speed.prefill_s(start, last)
            speed = speed if client.has(SINCE_0_3) else None
        freed = client.take_freed() if client.has(SINCE_0_3) else ()
        grant = self._instances if client.maps_arena and client.has(SINCE_0_3) else ()
        asked = LookupResult(0, asked_tokens=last - start, start=start, key=key)
        began, brief_s = time.monotonic(), client.deadlines.lookup_s + held_s
        wait = brief_s if began < self._brief_until else client.deadlines.of_lookup(prefill_s) + held_s
        found = self._ask("LOOKUP", m.Lookup(key, held_s, speed, freed, grant, ahead), asked, wait)
        if found is None:
            if wait > brief_s:
                now = time.monotonic()
                self._brief_until = max(self._brief_until, now + (now - began) * _BRIEF_AFTER_VAIN)
            client.free_soon(*freed)
            return UNANSWERED
        request.grants = found.grants
        return found

    def poll(self, result: LookupResult) -> LookupResult:
        """Return the new state of a pending lookup, which replaces `result`. Blocks as `lookup`, never raises."""
        return self._query(result) if result.pending else result

    def wait(self, result: LookupResult, timeout: float, more_than: int = _ALL) -> LookupResult:
        """Wait until nothing is pending, the hit is longer than `more_than` tokens, or `timeout` seconds have passed,
        and return the last answer, which replaces `result`."""
        asked_at, deadline = -math.inf, time.monotonic() + timeout
        while result.pending and result.hit_tokens <= more_than and (left := deadline - time.monotonic()) > 0:
            held_s = self._held_s(left)
            # An answer that was not held back, or none, is no reason to ask again at once.
            since = time.monotonic() - asked_at if held_s else 0.0
            if since < POLL_S:
                time.sleep(min(POLL_S - since, left))
            asked_at = time.monotonic()
            result = self._query(result, held_s, more_than if held_s and more_than < _ALL else -1)
        return result

    def arrivals(self, result: LookupResult, timeout: float) -> Iterator[LookupResult]:
        """Yield `result` and, while L2 loads, each later state with a longer hit, for at most `timeout` seconds: an
        engine can retrieve tokens that have arrived while L2 loads the rest. The last state is the final answer, even
        if its hit is not longer. Each state replaces the one before it."""
        deadline = time.monotonic() + timeout
        while True:
            yield result
            left = deadline - time.monotonic()
            if not result.pending or left <= 0:
                return
            result = self.wait(result, left, result.hit_tokens)

    def free(self, result: LookupResult) -> None:
        """Free the pins of a lookup, of which `result` is the last answer: after the workers have loaded, or when the
        request is abandoned. The server learns it with the next lookup, store or PING. Loads of taken grants go on."""
        self.release_ticket(result.ticket)
        self._client.free_soon(*(each.lease for each in result.take_grants()))

    def release_ticket(self, ticket: str) -> None:
        """Free a ticket of a lookup or of a plugin's request. Never blocks, never raises; callbacks may call it."""
        if ticket and self._client.has(SINCE_0_3):
            self._client.free_soon(ticket)
        elif ticket:
            self._client.send("FREE_LOOKUP_LOCKS", m.TicketRef(ticket))

    def end_request(self, request_id: str) -> None:
        """Free all pins that this client holds under a request id, not those of other clients. Never blocks."""
        payload = m.EndSession(request_id)
        if not request_id:
            return
        if not self._client.usable:
            # A silent server receives it when it recovers; no call waits for that again and again.
            self._client.send("END_SESSION", payload)
            return

        def answered(reply: Future[m.SessionEnded]) -> None:
            if (error := reply.exception()) is not None:
                # What it holds ends by its time limit, or with this process.
                self.failures += 1
                log.warning("the request END_SESSION failed: %s", error)

        self._client.begin("END_SESSION", payload, m.SessionEnded, urgent=True).add_done_callback(answered)

    def _held_s(self, wait_s: float) -> float:
        """Return for how long the server may hold an answer back: 0 if it cannot."""
        return min(wait_s, HELD_S) if wait_s > 0 and self._client.has(SINCE_0_3) else 0.0

    def _query(self, result: LookupResult, held_s: float = 0.0, more_than: int = -1) -> LookupResult:
        payload = m.PrefetchQuery(result.ticket, held_s, more_than)
        found = self._ask("QUERY_PREFETCH_STATUS", payload, result, self._client.deadlines.lookup_s + held_s)
        # A failed question has not ended the ticket: it must still be freed, and may be asked about again.
        return found or replace(result, hit_tokens=0, pending=True)

    def _ask(
        self, name: str, payload: m.Lookup | m.PrefetchQuery, before: LookupResult, timeout: float
    ) -> LookupResult | None:
        """Return the state after `before`, None if there was no answer within `timeout` seconds."""
        client = self._client
        if not client.usable:
            self._failed(ServerGone("the server does not answer"))
            return None
        try:
            late = self._release_late if name == "LOOKUP" else self._release_grants
            boot_id, began = client.boot_id if self._instances else None, time.monotonic()
            reply = client.request(name, payload, m.LookupReply, timeout=timeout, on_late=late)
            if not 0 <= reply.hit_tokens <= before.asked_tokens:
                raise ProtocolError(f"the server reports {reply.hit_tokens} hit tokens of {before.asked_tokens}")
        except LeaseUnknown:
            return MISS
        except KVFrameworkError as error:
            self._failed(error)
            log.warning("%s failed and counts as a miss: %s", name, error)
            return None
        # An answer of another server than before may be from either.
        if reply.grants and before.key is not None and boot_id is not None and client.boot_id == boot_id:
            before.grants.add(grants_of(reply, before.key, self.chunk_tokens, boot_id, began))
        else:
            self._release_grants(reply)
        asked, start, grants, key = before.asked_tokens, before.start, before.grants, before.key
        return LookupResult(reply.hit_tokens, reply.ticket, reply.pending, asked, start, grants, key)

    def _release_late(self, reply: m.LookupReply) -> None:
        """Release what a LOOKUP has granted that was answered after its deadline: no caller knows the ticket."""
        self.release_ticket(reply.ticket)
        self._release_grants(reply)

    def _release_grants(self, reply: m.LookupReply) -> None:
        """Release the grants of an answer that no caller gets. The ticket of a question is still the caller's."""
        self._client.free_soon(*(each.lease for each in reply.grants))

    def _failed(self, error: KVFrameworkError) -> None:
        self.failures += 1
        self._client.lost("lookups", error_code(error))
