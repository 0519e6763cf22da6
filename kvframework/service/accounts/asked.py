"""`Asked`: a LOOKUP from its receipt to its end. Its end is its first answer that is not pending, or the end of its
ticket before that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvframework.api.requests import CacheKey, ClientInfo
from kvframework.pricing.prefill import EngineSpeed
from kvframework.service.accounts.recording import Recorded
from kvframework.service.keys import KeyGrid
from kvframework.storage.l1.entries import StoredObject
from kvframework.storage.l2.loading import LoadTask
from kvframework.storage.manager import FindRow


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
