"""The records of STOREs and RETRIEVEs, whichever way their bytes take."""

from __future__ import annotations

from collections.abc import Iterable

from kvframework.api.keys import CacheKey
from kvframework.api.requests import ClientInfo
from kvframework.service.accounts.finished import FinishedRequests, Subject, subject_of
from kvframework.service.accounts.miss_facts import MissFacts
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
