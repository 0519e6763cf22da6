"""The facts about the first missing object of a request, gathered when the request ends, on a miss only."""

from __future__ import annotations

from math import inf

from kvframework.api.keys import DIGEST_BYTES, NAMESPACE_BYTES, PACKED_KEY_BYTES, CacheKey
from kvframework.service.accounts.asked import Asked
from kvframework.service.accounts.misses import LOAD_REFUSED, Facts, Row, Why, decide, elsewhere
from kvframework.storage.manager import StorageManager
from kvframework.text import timed

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
        refused = asked.grid is not None and asked.task is None and self._storage.has_tiers
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
            ghost, prefixes = storage.absent(missing, MAX_ROWS)
            if prefixes:
                rows = [Row(prefix, storage.records.get(prefix[:NAMESPACE_BYTES])) for prefix in prefixes]
                found = elsewhere(missing, mine, key.model_name, rows)
        cleared = self._tiers_cleared
        return decide(
            Facts(
                unanswered,
                priced,
                storage.tier_trouble(began),
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
