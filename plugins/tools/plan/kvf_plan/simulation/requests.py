"""What engines do with a prompt: LOOKUP as it comes, or near its turn, and a load from the tiers; in its turn RETRIEVE
of the hit, the computation of the rest, and STORE of the whole, all of them behind what the engine had itself. And what
a simulation has found of that."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from kvf_plan.simulation.chunks import Chunks
from kvf_plan.simulation.engines import Fleet
from kvf_plan.simulation.node import MODEL, Node, Session
from kvf_plan.simulation.sizes import Sizes
from kvf_plan.trace.form import Request
from kvframework.api.futures import Future
from kvframework.api.keys import CacheKey
from kvframework.wire import messages as m

# A load ends before that, by the timeouts of the tiers.
LONGEST_S = 24 * 3600.0


class Spread(msgspec.Struct, frozen=True):
    """Of many durations, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class TierOutcome(msgspec.Struct, frozen=True):
    """One `[[l2]]`. `loaded` chunks came from it, bytes are those of objects, and `used_bytes` the most that it held.
    `dropped` objects were not written for want of time or room, `evicted` ones made room. `busy` is the share of the
    trace's time in which it read or wrote; of two ways, that of the busier."""

    name: str
    loaded: int
    read_bytes: int
    written_bytes: int
    used_bytes: int
    dropped: int
    evicted: int
    busy: float


class Outcome(msgspec.Struct, frozen=True):
    """`tokens` are those of all prompts, `asked_tokens` those that fill chunks, and `l1_tokens` and `l2_tokens` what L1
    and L2 had of them; `blocks` and theirs are the same in chunks of the server. `seconds` is the time from the first
    request to the last first token. `ttft_s` and the engines' seconds are None without engines. `l1_bytes` is what L1
    holds at the end. `misses` counts lookups that missed something, by reason. `status` is the server's own status
    document at the end; bytes of L1 are smaller there by `byte_scale`, and times are virtual."""

    requests: int
    seconds: float
    tokens: int
    asked_tokens: int
    l1_tokens: int
    l2_tokens: int
    blocks: int
    l1_blocks: int
    l2_blocks: int
    ttft_s: Spread | None
    engine_s: float | None
    l1_capacity_bytes: int
    l1_bytes: int
    evicted: int
    misses: Mapping[str, int]
    tiers: list[TierOutcome]
    byte_scale: float
    status: Mapping[str, Any]


class Requests:
    """All requests. `under_way` is the number of those that have come and have no first token yet; without a fleet
    each has it at once, and they are to come in turn."""

    def __init__(self, node: Node, chunks: Chunks, fleet: Fleet | None) -> None:
        self.under_way = 0
        self.in_turn = fleet is None
        self._node = node
        self._chunks = chunks
        self._fleet = fleet
        # Those that are not looked up yet, and the number of those that are and that no engine has begun.
        self._unasked: deque[_Request] = deque()
        self._unasked_s = 0.0
        self._waiting = 0
        self._asking = False
        if fleet is not None:
            fleet.on_idle = self._ask_on
        self._came = 0
        self._tokens = self._blocks = 0
        self._ttft: list[float] = []
        self._first = self._last = node.time.now

    def arrived(self, prompt: Request) -> None:
        """A request has come, now."""
        digests = self._chunks.digests(prompt)
        first = min(prompt.start // self._chunks.tokens, len(digests))
        self._came += 1
        self._tokens += prompt.tokens
        self._blocks += len(digests) - first
        if self._came == 1:
            self._first = self._node.time.now
        request = _Request(f"r{self._came}", self._node.time.now, prompt.tokens, first, digests)
        self._unasked.append(request)
        self._unasked_s += self._seconds(request)
        self.under_way += 1
        self._ask_on()

    def _ask_on(self) -> None:
        """Look up the prompts whose turn is near."""
        if self._asking:  # an answer that comes at once may let an engine begin
            return
        self._asking = True
        while self._unasked and (self._fleet is None or self._fleet.asks(self._waiting)):
            request = self._unasked.popleft()
            self._unasked_s = self._unasked_s - self._seconds(request) if self._unasked else 0.0
            self._waiting += 1
            self._ask(request)
        self._asking = False

    def _ask(self, request: _Request) -> None:
        fleet, speed, session = self._fleet, None, self._node.sessions[0]
        if fleet is not None:
            queue = fleet.least_loaded()
            speed, session = fleet.speed(queue, self._unasked_s), self._node.sessions[queue.number]
        request.asker = session
        digests = request.digests
        if request.first == len(digests):
            self._ready(request, m.LookupReply(0))
            return
        reply = self._node.call(session, "LOOKUP", m.Lookup(self._key(request, len(digests), None), speed=speed))
        if not reply.pending:
            self._ready(request, reply)
            return
        request.hit = reply.hit_tokens
        answer = self._node.call(session, "QUERY_PREFETCH_STATUS", m.PrefetchQuery(reply.ticket, LONGEST_S))
        if isinstance(answer, Future):
            answer.add_done_callback(lambda later: self._ready(request, later.result(0)))
        else:
            self._ready(request, answer)

    def _ready(self, request: _Request, reply: Any) -> None:
        """All of the hit is in L1."""
        request.hit, request.ticket = reply.hit_tokens, reply.ticket
        if self._fleet is None:
            self._begin(request, request.asker)
            self._end(request, request.asker)
            return
        queue = self._fleet.least_loaded()
        engine = self._node.sessions[queue.number]
        queue.add(self._seconds(request), partial(self._begin, request, engine), partial(self._end, request, engine))

    def _begin(self, request: _Request, engine: Session) -> float:
        """Load the hit; return the seconds that the rest takes."""
        self._waiting -= 1
        if request.hit:
            key = self._key(request, request.first + request.hit // self._chunks.tokens, 0)
            plan = self._node.call(engine, "PREPARE_RETRIEVE", m.Prepare(key, engine.session_id))
            if not plan.hit or not self._node.call(engine, "COMMIT_RETRIEVE", m.Commit(plan.lease)).held:
                request.hit = 0
        if request.ticket:
            self._node.call(request.asker, "CANCEL", m.Cancel(ticket=request.ticket))
        self._ask_on()
        return self._seconds(request)

    def _end(self, request: _Request, engine: Session) -> None:
        """It has its first token."""
        if request.first < len(request.digests):
            key = self._key(request, len(request.digests), 0)
            plan = self._node.call(engine, "PREPARE_STORE", m.Prepare(key, engine.session_id))
            if plan.lease:
                self._node.call(engine, "COMMIT_STORE", m.Commit(plan.lease))
            self._node.stored(request.digests)
        self._last = self._node.time.now
        self._ttft.append(self._last - request.came)
        self.under_way -= 1

    def _seconds(self, request: _Request) -> float:
        # The last token is always computed.
        had = request.first * self._chunks.tokens + request.hit
        first = min(had, max(request.tokens - 1, 0))
        return 0.0 if self._fleet is None else self._fleet.seconds(first, request.tokens)

    def _key(self, request: _Request, chunks: int, rank: int | None) -> CacheKey:
        digests = b"".join(request.digests[:chunks])
        start, end = (each * self._chunks.tokens for each in (request.first, chunks))
        return CacheKey(MODEL, 1, rank, self._node.namespace, start, end, request.id, digests=digests)

    def outcome(self, sizes: Sizes) -> Outcome:
        status = self._node.service.report()
        lookups: Any = status["lookups"]
        l1: Any = status["l1"]
        models = lookups["by_model"].get(MODEL, {})
        l1_tokens, l2_tokens = models.get("l1_tokens", 0), models.get("l2_tokens", 0)
        seconds = self._last - self._first
        return Outcome(
            requests=self._came,
            seconds=seconds,
            tokens=self._tokens,
            asked_tokens=lookups["asked_tokens"],
            l1_tokens=l1_tokens,
            l2_tokens=l2_tokens,
            blocks=self._blocks,
            l1_blocks=l1_tokens // sizes.chunk_tokens,
            l2_blocks=l2_tokens // sizes.chunk_tokens,
            ttft_s=spread(self._ttft) if self._fleet is not None and self._ttft else None,
            engine_s=None if self._fleet is None else sum(queue.busy_s for queue in self._fleet.queues),
            l1_capacity_bytes=sizes.l1_capacity,
            l1_bytes=l1["used_bytes"] // sizes.place_bytes * sizes.object_bytes,
            evicted=l1["evictions"],
            misses={reason: count for reason, count in lookups["misses"].items() if count},
            tiers=[
                TierOutcome(
                    name=tier.name,
                    loaded=told["hits"],
                    read_bytes=tier.read_bytes,
                    written_bytes=tier.written_bytes,
                    used_bytes=tier.most_bytes,
                    dropped=told["write_dropped"] + told["write_lost"] + told["write_given_up"],
                    evicted=told["evicted"],
                    busy=max(tier.reads.busy_s, tier.writes.busy_s) / max(seconds, 1e-9),
                )
                for tier, told in zip(self._node.tiers, status["l2"], strict=True)  # type: ignore[call-overload]
            ],
            byte_scale=sizes.scale,
            status=status,
        )


class _Request:
    """One request: its digests, what it hits, and the ticket of that, which belongs to the engine that has asked. The
    chunks before `first` the engine had itself."""

    __slots__ = ("asker", "came", "digests", "first", "hit", "id", "ticket", "tokens")

    asker: Session

    def __init__(self, request_id: str, came: float, tokens: int, first: int, digests: list[bytes]) -> None:
        self.id = request_id
        self.came = came
        self.tokens = tokens
        self.first = first
        self.digests = digests
        self.hit = 0
        self.ticket = ""


def spread(seconds: list[float]) -> Spread:
    """Return mean and percentiles; zeros of nothing."""
    ordered = sorted(seconds) or [0.0]
    percentiles = (ordered[round(share * (len(ordered) - 1))] for share in (0.5, 0.9, 0.99))
    return Spread(sum(ordered) / len(ordered), *percentiles)
