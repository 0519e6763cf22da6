"""Requests from their receipt to their record: LOOKUPs, and STOREs and RETRIEVEs, whichever way their bytes take. A
request leaves one frozen record, made at its end. Those who count read it off the serving thread."""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvframework.api.keys import CacheKey, ChunkContent, sampled_parent, tenant_digest
from kvframework.api.listener import RequestRecord
from kvframework.api.requests import ClientInfo
from kvframework.api.transport import ArenaRange, StoreOutcome
from kvframework.config.schema import TenantConfig
from kvframework.config.tenants import bandwidth_of
from kvframework.errors import BadRange, TransportMismatch
from kvframework.pricing import EngineSpeed, LoadRate, Priced
from kvframework.record_ring import RecordRing
from kvframework.service.contexts import Contexts, RegisteredContext, own_context
from kvframework.service.key_sets import key_set
from kvframework.service.keys import KeyGrid, KeyResolver, check_key, found_part, prompt_part
from kvframework.storage.l1.entries import StoredObject
from kvframework.storage.l1.eviction_statistics import FindRow
from kvframework.storage.l1.leases import Reservation
from kvframework.storage.l2.loading import LoadTask
from kvframework.storage.table import Table
from kvframework.wire.messages import KeyGroup

log = logging.getLogger(__name__)

# Most characters of a text that a client chose.
MAX_TEXT = 128
# Salts whose tenant is remembered, of 1 KB at most; for others a digest is computed, 1 us.
_MOST_SALTS = 4096


class TenantNames:
    """The tenant of a request, by its salt. `names` are those of the tenants by number: 0 are the requests of no
    tenant, "". `lasts_s` is the lifetime of a lookup's ticket. Serving thread, and threads of plugins."""

    def __init__(self, tenants: Sequence[TenantConfig] = (), lasts_s: float = math.inf) -> None:
        self.names = ("", *(tenant.name for tenant in tenants))
        digests = {digest: number for number, tenant in enumerate(tenants, 1) for digest in tenant.keys.salts}
        rates = {number: bandwidth_of(tenant) for number, tenant in enumerate(tenants, 1)}
        self._rates = {number: LoadRate(rate, lasts_s) for number, rate in rates.items() if rate}
        self._by_salt = lru_cache(_MOST_SALTS)(lambda cache_salt: digests.get(tenant_digest(cache_salt), 0))

    def number(self, cache_salt: str) -> int:
        return self._by_salt(cache_salt) if cache_salt and len(self.names) > 1 else 0

    def name(self, cache_salt: str) -> str:
        return self.names[self.number(cache_salt)]

    def rate(self, cache_salt: str) -> LoadRate | None:
        """Return what limits the loads of a request's tenant. Whoever uses it holds the storage lock."""
        return self._rates.get(self.number(cache_salt)) if self._rates else None


# How often records are counted without being asked for, after none came and after some did; so many at a time.
IDLE_S, EVERY_S = 0.5, 0.1
_AT_ONCE = 64
_PAUSE_S = 0.001
_END_S = 1.0


@dataclass(eq=False, repr=False)
class RequestLog:
    """The records of finished requests: `ring` hands them to those who read it, the listeners of plugins and, here, the
    server's own: each of `listeners` gets every record once, in the order of the ends. A handler that shows counts
    calls `count` first, so that no count lacks a request that was answered. From any thread."""

    clock: Callable[[], float] = time.monotonic
    tenants: TenantNames = field(default_factory=TenantNames)
    ring: RecordRing = field(default_factory=RecordRing)

    def __post_init__(self) -> None:
        self.listeners: list[Callable[[RequestRecord], None]] = []
        self._reader = self.ring.open()
        self._taken: deque[RequestRecord] = deque()
        self._counting = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvf-records", daemon=True)
        self.start = self._thread.start  # counts in the background until `stop`

    def begun(self, request: str, client: ClientInfo, key: CacheKey, path: str) -> RequestRecord:
        """Return what is known of the record of a request that begins now, at which `monotonic` is until its `end`."""
        return self._record(request, client, key, 0.0, self.clock(), 0.0, "", path=path)

    def _record(
        self,
        request: str,
        client: ClientInfo,
        key: CacheKey,
        at: float,
        monotonic: float,
        seconds: float,
        outcome: str,
        **found: Any,
    ) -> RequestRecord:
        return RequestRecord(
            0,
            request,
            at,
            monotonic,
            seconds,
            key.request_id[:MAX_TEXT],
            client.name,
            client.pid,
            client.session_id,
            key.model_name[:MAX_TEXT],
            key.namespace[:4].hex(),
            outcome,
            key.start,
            key.end - key.start,
            tenant=self.tenants.name(key.cache_salt),
            # A client may send any text; W3C wants an invalid one ignored.
            trace=sampled_parent(key.trace) if key.trace else "",
            **found,
        )

    def end(self, begun: RequestRecord, outcome: str, why: MissReason | None = None, **found: Any) -> None:
        """Complete the record of a request that ends now, and put it into the ring. 3 us."""
        at, now = time.time(), self.clock()
        found |= _reason(why, at - now)
        seconds = now - begun.monotonic
        self.ring.finished(replace(begun, outcome=outcome, at=at, monotonic=now, seconds=seconds, **found))

    def looked_up(self, asked: PendingLookup, outcome: str, why: MissReason | None, **found: Any) -> None:
        """Make the record of a LOOKUP that ends now, and put it into the ring. 2 us."""
        at, now = time.time(), self.clock()
        found |= _reason(why, at - now)
        self.ring.finished(
            self._record("LOOKUP", asked.client, asked.key, at, now, now - asked.began, outcome, **found)
        )

    def count(self, most: int | None = None) -> bool:
        """Have `most` waiting records counted; False: none left. Blocks 3 us a record, outside the storage lock."""
        with self._counting:
            batch = self._reader.take()
            if batch.lost:
                log.error("%d records of finished requests were lost and are not counted", batch.lost)
            self._taken += [record for record in batch.records if isinstance(record, RequestRecord)]
            for _ in range(len(self._taken) if most is None else min(most, len(self._taken))):
                record = self._taken.popleft()
                for listener in self.listeners:
                    listener(record)
            return bool(self._taken)

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(_END_S)

    def _run(self) -> None:
        seen = -1
        while not self._ended.wait(IDLE_S if seen == (seen := self.ring.end) else EVERY_S):
            try:
                while self.count(_AT_ONCE) and not self._ended.wait(_PAUSE_S):
                    pass
            except Exception:
                log.exception("a finished request was not counted")


class MissReason(NamedTuple):
    """A reason, one of `kvframework.status.REASONS`, and what else is known, in words. Of what has a time: `at`, of the
    clock of the storage; of an eviction: after how many seconds without a use, and by which model's objects."""

    reason: str
    detail: str = ""
    at: float | None = None
    idle_s: float = 0.0
    by: str = ""


def _reason(why: MissReason | None, wall_s: float) -> dict[str, Any]:
    """Return the fields of a record with a reason; the wall clock is `wall_s` ahead of that of the storage."""
    if why is None:
        return {}
    cause_at = 0.0 if why.at is None else why.at + wall_s
    return {"reason": why.reason, "detail": why.detail, "cause_at": cause_at, "idle_s": why.idle_s, "by": why.by}


@dataclass(slots=True, eq=False)
class PendingLookup:
    """A LOOKUP until its record: its first answer that is not pending ends it, or the end of its ticket before that.

    `speed` is what its engine says of itself, `grant` are the instances whose loads its answer prepares. `grid` is None
    while its namespace is not known. `find` may run in a storage thread, under the storage lock."""

    client: ClientInfo
    key: CacheKey
    began: float
    speed: EngineSpeed | None = None
    grant: Sequence[int] = ()
    groups: Sequence[KeyGroup] = ()
    grid: KeyGrid | None = None
    # Present at the begin.
    l1_tokens: int = 0
    # Chunk of the prompt, and key, of the first object that lacked when it was last looked for.
    missing: tuple[int, bytes] | None = None
    task: LoadTask | None = None
    # The prices that decided about its load, once decided.
    priced: Priced | None = None
    # What limits the loads of its tenant, None for nothing; the chunks at which this has cut the hit; and whether the
    # tenant was charged for the hit of L1.
    rate: LoadRate | None = None
    most: int | None = None
    charged: bool = False
    ahead: bool = False
    # Its number in the trace that somebody records.
    traced: int = 0

    def find(self, row_of: FindRow) -> tuple[int, list[StoredObject]]:
        grid, rate = self.grid, self.rate
        assert grid is not None
        hit, objects = grid.find(row_of, self.most)
        if rate is not None and not self.charged:
            self.charged = True
            if grid.nbytes(hit) > (room := rate.room(self.began)):
                self.most = bisect_right(range(1, hit + 1), room, key=grid.nbytes)
                hit, objects = grid.find(row_of, self.most)
            rate.take(grid.nbytes(hit), self.began)
        self.missing = grid.first_missing(row_of, hit) if hit < grid.chunks else None
        return hit, objects


@dataclass(slots=True, eq=False)
class Transfer:
    """A STORE or RETRIEVE that has its objects. `record` is that of its success; `key` is for listeners of contents."""

    record: RequestRecord
    key: CacheKey | None = None
    chunk_tokens: int = 0


class Plan(NamedTuple):
    """What a STORE or RETRIEVE has got: a lease ("" for none), the range of each object, whose row counts as a layer
    group, and the outcome of a store, or the reason of a load that misses."""

    lease: str
    ranges: tuple[ArenaRange, ...] = ()
    outcome: StoreOutcome = StoreOutcome()
    reason: str = ""
    transfer: Transfer | None = None


# Transfers under leases of clients; the oldest is forgotten first. Beyond the second number no content is taken.
MAX_UNDER_WAY, MAX_KEYS = 4096, 1024

# Key, missing object if there is one, session, begin.
WhyMissed = Callable[[CacheKey, bytes | None, int, float], MissReason]


@dataclass(eq=False)
class Transfers:
    """What all ways of a transfer share: keys and objects, the record, and the content for listeners. `why_missed`
    gives the reason of a missed RETRIEVE. `end` runs on any thread, the rest on the serving one."""

    contexts: Contexts
    resolver: KeyResolver
    table: Table
    requests: RequestLog
    why_missed: WhyMissed
    chunk_size: int

    def __post_init__(self) -> None:
        self.begun = self.requests.begun
        self._ring = self.requests.ring
        self._under_way: dict[str, Transfer] = {}
        self.under = self._under_way.get  # a lease's transfer, None if there is none

    def grid(self, context: RegisteredContext, key: CacheKey, groups: Sequence[KeyGroup] = ()) -> KeyGrid:
        """Return the objects that the key names: of one rank, or of the shards that the instance holds, or those of
        `groups`. Raises `NamespaceMismatch` unless it names what was registered, and the errors of `resolve`."""
        check_key(key)
        context.check(key)
        if groups:
            return key_set(self.resolver, key, context.rank_desc(self.chunk_size), groups)
        return self.resolver.resolve(key, context.rank_desc(self.chunk_size), context.held)

    def engine_driven(
        self, client: ClientInfo, instance_id: int, key: CacheKey, groups: Sequence[KeyGroup] = ()
    ) -> KeyGrid:
        """Do as `grid`, for an instance whose engine moves the bytes. Raises `TransportMismatch` if the server does."""
        context = own_context(self.contexts, instance_id, client)
        if context.memory is not None:
            raise TransportMismatch(
                f"instance {context.instance_id} uses {context.transport}, which the server drives",
                available="the requests STORE and RETRIEVE",
            )
        return self.grid(context, key, groups)

    def reserve(
        self,
        begun: RequestRecord,
        key: CacheKey,
        grid: KeyGrid,
        wanted: Sequence[int],
        *,
        owner: int,
        lease_s: float | None,
        share: float = 1.0,
    ) -> Plan:
        """Reserve places for a STORE of the objects `wanted` of `grid.flat`, as far as they are absent."""
        sized = grid.sized()
        result = self.table.reserve(
            [sized[index] for index in wanted],
            owner=owner,
            request_id=key.request_id,
            lease_s=lease_s,
            most_bytes=math.inf if share >= 1.0 else share * self.table.capacity,
            client=begun.session_id,
            prompt=prompt_part(key, grid, wanted),
        )
        result.placed = [(wanted[at], offset) for at, offset in result.placed]
        return self.reserved(begun, key, grid, result)

    def reserved(self, begun: RequestRecord, key: CacheKey, grid: KeyGrid, result: Reservation) -> Plan:
        """Return the plan of a STORE with these places, of objects of `grid.flat`; one without any ends here."""
        outcome = "partial" if result.dropped else "stored"
        if result.lease is None:
            outcome = "dropped" if result.dropped else "present"
        ranges = tuple(ArenaRange(*grid.place(index), offset, grid.nbytes_of(index)) for index, offset in result.placed)
        added = len({grid.at(index) for index, _ in result.placed}) * grid.desc.chunk_tokens
        transfer = self._transfer(begun, key, grid, outcome, ranges, added)
        plan = StoreOutcome(0, result.present, result.in_flight, result.dropped)
        if result.lease is None:
            self.requests.end(transfer.record, outcome)
            return Plan("", outcome=plan)
        return Plan(result.lease.id, ranges, plan, transfer=transfer)

    def pin(self, begun: RequestRecord, key: CacheKey, grid: KeyGrid, *, owner: int, lease_s: float | None) -> Plan:
        """Pin the objects that a hit of the whole key uses; a miss, which ends here, if one of them is missing, the
        share of L1 of the session that asks is pinned, or its tenant loads too much."""
        rate, nbytes = self.requests.tenants.rate(key.cache_salt), 0
        if rate is not None:
            nbytes = grid.nbytes(grid.chunks)
            with self.table.lock:
                if not rate.may_copy(nbytes, begun.monotonic):
                    self.table.count(retrieves=1, retrieve_misses=1)
                    self.requests.end(begun, "miss", MissReason("bandwidth", str(rate)), missing=key.start)
                    return Plan("", reason=str(rate))
        lease = self.table.pin_found(
            grid.whole,
            owner=owner,
            request_id=key.request_id,
            lease_s=lease_s,
            prompt=found_part(key, grid, grid.chunks),
            asked_by=begun.session_id,
        )
        self.table.count(retrieves=1, retrieve_misses=lease is None)
        if lease is None:
            return Plan("", reason=self._missed(begun, key, grid))
        if rate is not None:
            with self.table.lock:
                rate.copied(nbytes)
        ranges = tuple(
            ArenaRange(*grid.place(index), stored.offset, stored.length)
            for index, stored in zip(grid.needed(grid.chunks), lease.objects, strict=True)
        )
        return Plan(lease.id, ranges, transfer=self._transfer(begun, key, grid, "hit", ranges))

    def _missed(self, begun: RequestRecord, key: CacheKey, grid: KeyGrid) -> str:
        with self.table.lock:
            missing = grid.first_missing(self.table.row, grid.find(self.table.row)[0])
        self.requests.end(
            begun,
            "miss",
            self.why_missed(key, missing and missing[1], begun.session_id, begun.monotonic),
            missing=key.start + missing[0] * grid.desc.chunk_tokens if missing else -1,
            chunk_tokens=grid.desc.chunk_tokens,
        )
        return "some objects are not in L1" if missing else "this client already pins its full share of L1"

    def keep(self, plan: Plan) -> None:
        if plan.transfer is not None:
            if len(self._under_way) >= MAX_KEYS:
                plan.transfer.key = None
            self._under_way[plan.lease] = plan.transfer
            if len(self._under_way) > MAX_UNDER_WAY:
                del self._under_way[next(iter(self._under_way))]

    def lapsed(self, lease: str, owner: int) -> bool:
        """Whether the pins of a client's transfer under way have lapsed, as L1 does not know their lease any more."""
        transfer = self._under_way.get(lease)
        return transfer is not None and transfer.record.session_id == owner

    def end_lease(self, lease: str, content: ChunkContent | None = None, *, ok: bool) -> None:
        """End the transfer that the client began under a lease, unless that is forgotten."""
        self.end(self._under_way.pop(lease, None), content, ok=ok)

    def end(self, transfer: Transfer | None, content: ChunkContent | None = None, *, ok: bool) -> None:
        """Add a transfer; if it is `ok` its objects are there, and `content`, which was checked, is theirs."""
        if transfer is None:
            return
        record, key = transfer.record, transfer.key
        if ok:
            self.requests.end(record, record.outcome)
        else:
            self.requests.end(record, "failed", added_tokens=min(record.added_tokens, 0))
        if ok and key is not None and (content is not None or key.tokens):
            self._ring.registered(key, content)

    def end_session(self, session_id: int) -> None:
        """Add, as failed, the transfers under way of a client that has ended."""
        ending = [lease for lease, each in self._under_way.items() if each.record.session_id == session_id]
        for lease in ending:
            self.end_lease(lease, ok=False)

    def check(self, transfer: Transfer | None, content: ChunkContent | None) -> None:
        """Raise `BadRange` for a content that is none of the transfer's tokens."""
        if transfer is not None and transfer.key is not None:
            self.check_key(transfer.key, transfer.chunk_tokens, content)

    def check_key(self, key: CacheKey, chunk_tokens: int, content: ChunkContent | None) -> None:
        """Like `check`, for a request that brings key and content."""
        if not self._ring.wants_contents or content is None:
            return
        problem = content.problem(key.end - key.start, chunk_tokens)
        if problem:
            available = f"the content of tokens {key.start} to {key.end}, in chunks of {chunk_tokens} tokens"
            raise BadRange(problem, where="content", available=available)

    def _transfer(
        self,
        begun: RequestRecord,
        key: CacheKey,
        grid: KeyGrid,
        outcome: str,
        ranges: Sequence[ArenaRange],
        added: int = -1,
    ) -> Transfer:
        nbytes = sum([place.length for place in ranges])
        record = replace(begun, outcome=outcome, objects=len(ranges), nbytes=nbytes, added_tokens=added)
        return Transfer(record, key if self._ring.wants_contents else None, grid.desc.chunk_tokens)
