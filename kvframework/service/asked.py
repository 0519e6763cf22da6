"""`Asked`: a LOOKUP from its receipt to its end. Its end is its first answer that is not pending, or the end of its
ticket before that."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from kvframework.api.keys import DIGEST_BYTES, NAMESPACE_BYTES, PACKED_KEY_BYTES, CacheKey
from kvframework.api.requests import ClientInfo
from kvframework.logs.amounts import timed
from kvframework.pricing.prefill import EngineSpeed
from kvframework.service.finished import LOAD_REFUSED, Facts, Row, Why, decide, elsewhere
from kvframework.service.keys import KeyGrid
from kvframework.service.recording import Recorded
from kvframework.storage.l1.entries import StoredObject
from kvframework.storage.l2.loading import LoadTask
from kvframework.storage.manager import FindRow, StorageManager


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
