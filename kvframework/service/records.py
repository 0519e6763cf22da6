"""Requests from their receipt to their record: LOOKUPs, and STOREs and RETRIEVEs, whichever way their bytes take.

A request leaves one frozen record, made at its end. Those who count read it off the serving thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvframework.api.keys import CacheKey, ChunkContent, sampled_parent
from kvframework.api.listener import NOT_MISSED, MissReason, RequestRecord, RequestSubject, TierCall
from kvframework.api.requests import ClientInfo
from kvframework.config import TenantConfig, tenant_digest
from kvframework.errors import BadRange
from kvframework.pricing import EngineSpeed, Priced
from kvframework.record_ring import NO_RECORDS, RecordRing
from kvframework.service.keys import KeyGrid
from kvframework.service.recording import Recorded
from kvframework.storage.l1.entries import StoredObject
from kvframework.storage.l1.eviction_statistics import FindRow
from kvframework.storage.l1.leases import Reservation
from kvframework.storage.l2.loading import LoadTask
from kvframework.storage.manager import StorageManager

log = logging.getLogger(__name__)

# Of a text that a client chose.
MAX_TEXT = 128


def subject_of(client: ClientInfo, key: CacheKey, began: float, path: str = "", tenant: str = "") -> RequestSubject:
    return RequestSubject(
        began,
        client.name,
        client.pid,
        client.session_id,
        key.request_id[:MAX_TEXT],
        key.model_name[:MAX_TEXT],
        key.namespace[:4],
        key.start,
        key.end - key.start,
        path,
        tenant,
        # A client may send any text; W3C wants an invalid one ignored.
        sampled_parent(key.trace) if key.trace else "",
    )


# The tenant of a request, by its salt. Serving thread, and threads of plugins.

# Salts whose tenant is remembered, of 1 KB at most; for others a digest is computed, 1 us.
_MOST_SALTS = 4096


class TenantNames:
    """`names` are those of the tenants by number: 0 are the requests of no tenant, ""."""

    def __init__(self, tenants: Sequence[TenantConfig] = ()) -> None:
        self.names = ("", *(tenant.name for tenant in tenants))
        self._digests = {digest: number for number, tenant in enumerate(tenants, 1) for digest in tenant.keys.salts}
        self._known: dict[str, int] = {}

    def number(self, cache_salt: str) -> int:
        """Return the number of the tenant whose salt this is."""
        if not self._digests or not cache_salt:
            return 0
        known = self._known.get(cache_salt)
        if known is None:
            known = self._digests.get(tenant_digest(cache_salt), 0)
            if len(self._known) >= _MOST_SALTS:
                self._known.clear()
            self._known[cache_salt] = known
        return known

    def name(self, cache_salt: str) -> str:
        return self.names[self.number(cache_salt)]


# Records that wait for those who count; beyond, who makes one counts them.
MOST_WAITING = 4096
# They are counted this often without being asked for, so many at a time, with a pause for the serving thread.
EVERY_S = 0.1
_AT_ONCE = 16
_PAUSE_S = 0.0005
_END_S = 1.0


class RequestLog:
    """The records of finished requests on their way to those who count, which `listeners` are: each gets every record
    once, in the order of the ends. `add` and `count` run on any thread. A handler that shows counts calls `count`
    first, so that no count lacks a request that was answered. `ring` has them for plugins."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        tenant_of: Callable[[str], str] = lambda _salt: "",
        ring: RecordRing = NO_RECORDS,
    ) -> None:
        self.clock = clock
        self.tenant_of = tenant_of
        self.listeners: list[Callable[[RequestRecord], None]] = []
        self._ring = ring
        self._waiting: deque[RequestRecord] = deque()
        self._counting = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvf-records", daemon=True)

    def add(
        self,
        request: str,
        subject: RequestSubject,
        outcome: str,
        *,
        l1_tokens: int = 0,
        l2_tokens: int = 0,
        missing: int = -1,
        chunk_tokens: int = 0,
        why: MissReason = NOT_MISSED,
        objects: int = 0,
        nbytes: int = 0,
        tier_calls: Sequence[TierCall] = (),
        prices: tuple[float, float] = (0.0, 0.0),
        added_tokens: int = -1,
        prefix: bytes = b"",
    ) -> None:
        """Make the record of a request that ends now. See `RequestRecord` for the fields. 1 us."""
        record = RequestRecord(
            request,
            subject,
            outcome,
            time.time(),
            self.clock(),
            l1_tokens,
            l2_tokens,
            missing,
            chunk_tokens,
            why,
            objects,
            nbytes,
            # A copy: the load of a lookup that was given up goes on.
            tuple(tier_calls) if subject.trace else (),
            *prices,
            added_tokens,
            prefix,
        )
        self._waiting.append(record)
        if self._ring.wanted:
            self._ring.finished(record)
        # Whoever counts now may wait for a lock that this thread holds, and goes on later.
        if len(self._waiting) > MOST_WAITING and self._counting.acquire(blocking=False):
            try:
                self._count(len(self._waiting))
            finally:
                self._counting.release()

    def count(self, most: int | None = None) -> bool:
        """Have the waiting records counted, at most `most` of them; False if none is left. Blocks for 3 us a record.
        Not for who holds the lock of the storage."""
        with self._counting:
            waiting = len(self._waiting)
            self._count(waiting if most is None else min(most, waiting))
        return bool(self._waiting)

    def _count(self, records: int) -> None:
        for _ in range(records):
            record = self._waiting.popleft()
            for listener in self.listeners:
                listener(record)

    def start(self) -> None:
        """Count in the background until `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(_END_S)

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            try:
                while self.count(_AT_ONCE) and not self._ended.wait(_PAUSE_S):
                    pass
            except Exception:
                log.exception("a finished request was not counted")


class PendingLookup:
    """A LOOKUP until its record: its first answer that is not pending ends it, or the end of its ticket before that.

    What it asks for, and what is known of its first missing object. `grid` is None while its namespace is not
    known. `find` may run in a storage thread, under the storage lock."""

    __slots__ = (
        "began",
        "client",
        "grant",
        "grid",
        "key",
        "l1_tokens",
        "missing",
        "over",
        "priced",
        "recorded",
        "speed",
        "task",
    )

    def __init__(
        self,
        client: ClientInfo,
        key: CacheKey,
        began: float,
        speed: EngineSpeed | None = None,
        grant: Sequence[int] = (),
    ) -> None:
        self.client = client
        self.key = key
        self.began = began
        # The instances whose loads its answer prepares.
        self.grant = grant
        # What its engine says of itself, and what its load was decided by, once it was.
        self.speed = speed
        self.priced: Priced | None = None
        # Whether it has ended.
        self.over = False
        self.grid: KeyGrid | None = None
        # Present at the begin.
        self.l1_tokens = 0
        # Chunk of the prompt, and key, of the first object that lacked when it was last looked for.
        self.missing: tuple[int, bytes] | None = None
        self.task: LoadTask | None = None
        # In the trace that somebody records.
        self.recorded: Recorded | None = None

    def find(self, row_of: FindRow) -> tuple[int, list[StoredObject]]:
        assert self.grid is not None
        hit, objects = self.grid.find(row_of)
        self.missing = self.grid.first_missing(row_of, hit) if hit < self.grid.chunks else None
        return hit, objects


# Transfers that have begun and not ended; the oldest is forgotten first.
MAX_UNDER_WAY = 4096


# Key, missing object if there is one, session, begin.
WhyMissed = Callable[[CacheKey, bytes | None, int, float], MissReason]


class TransferRecords:
    """`why_missed` gives the reason of a RETRIEVE that missed. `begun` and `missed` run on the serving thread, and so
    do `under_way` and `ended`; `finished` on any."""

    def __init__(
        self,
        storage: StorageManager,
        requests: RequestLog,
        why_missed: WhyMissed,
    ) -> None:
        self.finished = requests.add
        self._tenant_of = requests.tenant_of
        self._storage = storage
        self._clock = storage.clock
        self._why_missed = why_missed
        self._under_way: dict[str, tuple[str, RequestSubject, str, int, int, int]] = {}

    def begun(self, client: ClientInfo, key: CacheKey, path: str) -> RequestSubject:
        """Return the subject of a transfer that begins now."""
        return subject_of(client, key, self._clock(), path, self._tenant_of(key.cache_salt))

    def missed(self, subject: RequestSubject, key: CacheKey, grid: KeyGrid) -> str:
        """Add a RETRIEVE that found something missing in L1, or its client's share of it pinned; say which."""
        missing = self._storage.table.in_rows(lambda row_of: grid.first_missing(row_of, grid.find(row_of)[0]))
        chunk_tokens = grid.desc.chunk_tokens
        why = self._why_missed(key, missing and missing[1], subject.session_id, subject.began)
        first = key.start + missing[0] * chunk_tokens if missing else -1
        self.finished("RETRIEVE", subject, "miss", missing=first, chunk_tokens=chunk_tokens, why=why)
        return "not all objects are in L1" if missing else "this client keeps its share of L1 from eviction"

    def under_way(
        self,
        request: str,
        lease: str,
        subject: RequestSubject,
        outcome: str,
        objects: int,
        nbytes: int,
        added: int = -1,
    ) -> None:
        """Keep what a client begins under a lease until `ended`; `outcome` and `added`, the tokens that a store adds,
        are those of a transfer that succeeds."""
        self._under_way[lease] = request, subject, outcome, objects, nbytes, added
        if len(self._under_way) > MAX_UNDER_WAY:
            del self._under_way[next(iter(self._under_way))]

    def ended(self, lease: str, *, ok: bool) -> None:
        """Add the transfer that the client began under a lease, unless that is forgotten."""
        begun = self._under_way.pop(lease, None)
        if begun is not None:
            request, subject, outcome, objects, nbytes, added = begun
            self.finished(
                request,
                subject,
                outcome if ok else "failed",
                objects=objects,
                nbytes=nbytes,
                added_tokens=added if ok else min(added, 0),
            )

    def granted(
        self, client: ClientInfo, subject: RequestSubject, took_s: float, *, objects: int, nbytes: int, ok: bool
    ) -> None:
        """Add a RETRIEVE of which the server hears at its end: it took its client so long. `subject` is that of the
        LOOKUP that granted it, begun with the grant."""
        subject = subject._replace(
            began=max(self._clock() - took_s, subject.began),
            client=client.name,
            pid=client.pid,
            session_id=client.session_id,
        )
        self.finished("RETRIEVE", subject, "hit" if ok else "failed", objects=objects, nbytes=nbytes)

    def end_session(self, session_id: int) -> None:
        """Add, as failed, the transfers under way of a client that has ended."""
        under_way = self._under_way.items()
        for lease in [lease for lease, (_, subject, *_) in under_way if subject.session_id == session_id]:
            self.ended(lease, ok=False)


def added_tokens(chunks: Iterable[int], grid: KeyGrid) -> int:
    """Return the tokens that a store adds: `chunks` has the chunk of each object that it writes."""
    return len(set(chunks)) * grid.desc.chunk_tokens


def store_outcome(result: Reservation) -> str:
    """Return how a store ends that writes all for which there is a place."""
    if result.dropped:
        return "partial" if result.placed else "dropped"
    return "stored" if result.placed else "present"


# The content that transfers bring for listeners: checked, and put into the ring once the transfer has succeeded.
# Serving thread, and those in which copies end; without a listener that wants contents nothing is kept and done.

# Leases whose keys are kept; of older ones the content is passed over.
MAX_PREPARED = 1024


class Contents:
    """A client prepares with the key and commits with the content, so the keys are kept in between."""

    def __init__(self, ring: RecordRing) -> None:
        self._ring = ring
        self._prepared: dict[str, tuple[int, CacheKey, int]] = {}

    @property
    def wanted(self) -> bool:
        """Whether anything is kept."""
        return self._ring.wants_contents

    def prepared(self, session_id: int, lease: str, key: CacheKey, chunk_tokens: int) -> None:
        """A lease was given to a session for the objects of a key."""
        if self._ring.wants_contents:
            self._prepared[lease] = session_id, key, chunk_tokens
            if len(self._prepared) > MAX_PREPARED:
                del self._prepared[next(iter(self._prepared))]

    def check(self, lease: str, content: ChunkContent | None) -> None:
        """Raise `BadRange` for a content that is none of the key's tokens."""
        kept = self._prepared.get(lease)
        if kept is not None:
            self.check_key(kept[1], kept[2], content)

    def check_key(self, key: CacheKey, chunk_tokens: int, content: ChunkContent | None) -> None:
        """Like `check`, for a request that brings key and content."""
        if not self._ring.wants_contents or content is None:
            return
        problem = content.problem(key.end - key.start, chunk_tokens)
        if problem:
            raise BadRange(
                problem,
                where="content",
                available=f"that of the tokens {key.start} to {key.end}, in chunks of {chunk_tokens}",
            )

    def ended(self, lease: str, content: ChunkContent | None = None, *, ok: bool = False) -> None:
        """A lease has ended; `ok`: its objects are there, and `content`, which was checked, is theirs."""
        kept = self._prepared.pop(lease, None)
        if kept is not None and ok:
            self.named(kept[1], content)

    def named(self, key: CacheKey, content: ChunkContent | None) -> None:
        """The objects of a key are there, and `content`, which was checked, is theirs."""
        if self._ring.wants_contents and (content is not None or key.tokens):
            self._ring.registered(key, content)

    def end_session(self, session_id: int) -> None:
        for lease in [lease for lease, (of, _, _) in self._prepared.items() if of == session_id]:
            del self._prepared[lease]
