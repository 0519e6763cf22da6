"""Requests from their receipt to their record: LOOKUPs, and STOREs and RETRIEVEs, whichever way their bytes take.

The end of a LOOKUP is its first answer that is not pending, or the end of its ticket before that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from kvframework.api.content import ChunkContent
from kvframework.api.keys import DIGEST_BYTES, NAMESPACE_BYTES, PACKED_KEY_BYTES, CacheKey
from kvframework.api.requests import ClientInfo
from kvframework.errors import BadRange
from kvframework.events.feed import Events
from kvframework.pricing.prefill import EngineSpeed
from kvframework.service.finished import (
    LOAD_REFUSED,
    Facts,
    FinishedRequests,
    Row,
    Subject,
    Why,
    decide,
    elsewhere,
    subject_of,
)
from kvframework.service.keys import KeyGrid
from kvframework.service.recording import Recorded
from kvframework.storage.l1.entries import StoredObject
from kvframework.storage.l1.eviction_statistics import FindRow
from kvframework.storage.l1.leases import Reservation
from kvframework.storage.l2.loading import LoadTask
from kvframework.storage.manager import StorageManager
from kvframework.text import timed


class Priced(NamedTuple):
    """Of a hit of `found` chunks the first `chunks` are used. `load_s` and `compute_s` are the prices of the others,
    or, if there are none, of all that was not in L1; `saved_s` is what that spares, see `kvframework.pricing.cut`."""

    chunks: int
    found: int
    load_s: float
    compute_s: float
    saved_s: float

    @property
    def is_cut(self) -> bool:
        return self.chunks < self.found


class Asked:
    """What a LOOKUP asks for, and what is known of its first missing object. `grid` is None while its namespace is not
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


# The facts about the first missing object of a request, gathered when the request ends, on a miss only.

# Rows of L1, the latest first, in which a missing chunk is looked for: some 5 us.
MAX_ROWS = 64


class MissFacts:
    """Serving thread only. 10 us a miss."""

    def __init__(self, storage: StorageManager) -> None:
        self._storage = storage
        self._began = storage.clock()
        # The sessions of clients that have used an earlier server, if its content was lost.
        self._from_before: set[int] = set()
        # When the tiers were cleared, by model; "" for all models.
        self._tiers_cleared: dict[str, float] = {}

    def begin_session(self, session_id: int, *, from_before: bool) -> None:
        if from_before:
            self._from_before.add(session_id)

    def end_session(self, session_id: int) -> None:
        self._from_before.discard(session_id)

    def tiers_cleared(self, model: str) -> None:
        """Record that the tiers were cleared of a model's objects, of all with ""."""
        if not model:
            self._tiers_cleared.clear()
        self._tiers_cleared[model] = self._storage.clock()

    def of_lookup(self, asked: Asked, *, unanswered: bool) -> Why:
        """Say why a lookup missed its first missing chunk."""
        refused = asked.grid is not None and asked.task is None and bool(self._storage.tiers.stores)
        missing = asked.missing[1] if asked.missing else _first_key(asked)
        priced = ""
        cut = asked.priced
        if cut is not None and cut.is_cut and asked.missing is not None and asked.missing[0] == cut.chunks:
            priced = f"its load would take {timed(cut.load_s)}, its computation {timed(cut.compute_s)}"
        return self._why(asked.key, missing, asked.client.session_id, asked.began, unanswered, refused, priced)

    def of_retrieve(self, key: CacheKey, missing: bytes | None, session_id: int, began: float) -> Why:
        """Say why an object that a RETRIEVE needs was missing in L1, None: none was; tiers are not asked then."""
        if missing is None:
            return LOAD_REFUSED
        return self._why(key, missing, session_id, began, False, False)

    def _why(
        self,
        key: CacheKey,
        missing: bytes | None,
        session_id: int,
        began: float,
        unanswered: bool,
        refused: bool,
        priced: str = "",
    ) -> Why:
        storage = self._storage
        mine = storage.records.get(key.namespace)
        ghost = found = None
        if missing is not None:
            ghost, prefixes = storage.table.absent(missing, MAX_ROWS)
            if prefixes:
                rows = [Row(prefix, storage.records.get(prefix[:NAMESPACE_BYTES])) for prefix in prefixes]
                found = elsewhere(missing, mine, key.model_name, rows)
        cleared = self._tiers_cleared
        return decide(
            Facts(
                unanswered,
                priced,
                storage.tiers.trouble(began),
                refused,
                ghost,
                max(cleared.get("", -inf), cleared.get(key.model_name, -inf)) if cleared else None,
                found,
                mine is not None,
                session_id in self._from_before,
                storage.clock() - self._began,
            )
        )


def _first_key(asked: Asked) -> bytes | None:
    """Return a key of the first chunk in a namespace that is not known; without the salt, rank and layer group, which
    are of no use there."""
    key = asked.key
    first = key.start * len(key.digests) // (key.end * DIGEST_BYTES) * DIGEST_BYTES
    digest = key.digests[first : first + DIGEST_BYTES]
    unknown = bytes(PACKED_KEY_BYTES - len(key.namespace) - DIGEST_BYTES)
    return key.namespace + unknown + digest if len(digest) == DIGEST_BYTES else None


# Transfers that have begun and not ended; the oldest is forgotten first.
MAX_UNDER_WAY = 4096


class TransferAccounts:
    """`begun` and `missed` run on the serving thread, and so do `under_way` and `ended`; `finished` on any."""

    def __init__(self, storage: StorageManager, finished: FinishedRequests, miss_facts: MissFacts) -> None:
        self.finished = finished.add
        self._tenant_of = finished.tenant_of
        self._storage = storage
        self._clock = storage.clock
        self._miss_facts = miss_facts
        self._under_way: dict[str, tuple[str, Subject, str, int, int, int]] = {}

    def begun(self, client: ClientInfo, key: CacheKey, path: str) -> Subject:
        """Return the subject of a transfer that begins now."""
        return subject_of(client, key, self._clock(), path, self._tenant_of(key.cache_salt))

    def missed(self, subject: Subject, key: CacheKey, grid: KeyGrid) -> str:
        """Add a RETRIEVE that found something missing in L1, or its client's share of it pinned; say which."""
        missing = self._storage.table.in_rows(lambda row_of: grid.first_missing(row_of, grid.find(row_of)[0]))
        chunk_tokens = grid.desc.chunk_tokens
        why = self._miss_facts.of_retrieve(key, missing and missing[1], subject.session_id, subject.began)
        first = key.start + missing[0] * chunk_tokens if missing else -1
        self.finished("RETRIEVE", subject, "miss", missing=first, chunk_tokens=chunk_tokens, why=why)
        return "not all objects are in L1" if missing else "this client keeps its share of L1 from eviction"

    def under_way(
        self, request: str, lease: str, subject: Subject, outcome: str, objects: int, nbytes: int, added: int = -1
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
        self, client: ClientInfo, subject: Subject, took_s: float, *, objects: int, nbytes: int, ok: bool
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


# The content that transfers bring for routers: checked, and handed to the events once the transfer has succeeded.
# Serving thread, and those in which copies end; without `[events]` nothing is kept and nothing done.

# Leases whose keys are kept; of older ones the content is passed over.
MAX_PREPARED = 1024


class Contents:
    """A client prepares with the key and commits with the content, so the keys are kept in between."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._prepared: dict[str, tuple[int, CacheKey, int]] = {}

    @property
    def wanted(self) -> bool:
        """Whether anything is kept."""
        return self._events.wanted

    def prepared(self, session_id: int, lease: str, key: CacheKey, chunk_tokens: int) -> None:
        """A lease was given to a session for the objects of a key."""
        if self._events.wanted:
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
        if not self._events.wanted or content is None:
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
        if self._events.wanted and (content is not None or key.tokens):
            self._events.named(key, content)

    def end_session(self, session_id: int) -> None:
        for lease in [lease for lease, (of, _, _) in self._prepared.items() if of == session_id]:
            del self._prepared[lease]
