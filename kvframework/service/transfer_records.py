"""The records of STOREs and RETRIEVEs, whichever way their bytes take."""

from __future__ import annotations

from collections.abc import Iterable

from kvframework.api.content import ChunkContent
from kvframework.api.keys import CacheKey
from kvframework.api.requests import ClientInfo
from kvframework.errors import BadRange
from kvframework.events.feed import Events
from kvframework.service.asked import MissFacts
from kvframework.service.finished import FinishedRequests, Subject, subject_of
from kvframework.service.keys import KeyGrid
from kvframework.storage.l1.objects import Reservation
from kvframework.storage.manager import StorageManager

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
        missing = self._storage.in_rows(lambda row_of: grid.first_missing(row_of, grid.find(row_of)[0]))
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
