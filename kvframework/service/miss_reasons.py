"""Why the first missing chunk of a lookup missed: the facts are gathered and decided upon when a miss ends."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from kvframework.api.keys import DIGEST_BYTES, NAMESPACE_BYTES, PACKED_KEY_BYTES, SALT_BYTES, CacheKey
from kvframework.api.layout import GroupDesc, MemoryLayoutDesc
from kvframework.service.records import MissReason, PendingLookup
from kvframework.storage.l1.eviction_statistics import CAUSES, LAST_EVICTION, Cause, Ghost
from kvframework.storage.manager import StorageManager
from kvframework.storage.namespaces import NamespaceRecord
from kvframework.text import short_number

# A later event explains more than an earlier one, and what the server knows of an object more than what it knows of
# others: so a tier that failed during the lookup comes first, then what became of the object, then where else its chunk
# is readable, then the server's start.

# Content of an earlier server is missed for this long after a start; later most prompts are new.
START_EXPLAINS_S = 3600.0
_PLAIN_SALT = bytes(SALT_BYTES)
_SALT = slice(NAMESPACE_BYTES, NAMESPACE_BYTES + SALT_BYTES)
_RANK = slice(_SALT.stop, _SALT.stop + 4)


def decide(
    *,
    down: str = "",
    refused: bool = False,
    ghost: Ghost | None = None,
    tiers_cleared_at: float = -inf,
    elsewhere: MissReason | None = None,
    named: bool = True,
    from_before: bool = False,
    up_s: float = 0.0,
) -> MissReason:
    """Return the reason by what is known of a missing object when the lookup ends. `down`: the tier that failed since
    the lookup's begin, "" for none. `refused`: no load began, although there is a tier. `tiers_cleared_at`: when the
    tiers were last cleared of such objects. `elsewhere`: why the same chunk is readable under another name. `named`:
    whether the namespace is known. `from_before`: the client used an earlier server, whose content this one began
    without, `up_s` seconds ago."""
    if down:
        return MissReason("tier_down", down)
    if refused:
        return MissReason("timed_out", "the load did not begin, because too many loads were in progress")
    if ghost is not None:
        if tiers_cleared_at >= ghost.at:
            return MissReason("cleared", "an operator cleared L1 and L2", tiers_cleared_at)
        if ghost.cause <= LAST_EVICTION:
            return MissReason("evicted", _EVICTED.get(ghost.cause, ""), ghost.at, ghost.idle_s, ghost.by)
        return MissReason(CAUSES[ghost.cause], "", ghost.at)
    if elsewhere is not None:
        return elsewhere
    if from_before and up_s < START_EXPLAINS_S:
        return MissReason("server_started", "the client had used the server before the server's last start")
    if not named:
        return MissReason("unknown_namespace", "no instance has registered the namespace, and no tier knows it")
    return MissReason("never_stored")


# The reasons of a load that found all its objects.
_LOAD_REFUSED = MissReason("dropped_share", "the load was refused, because the client pins its full share of L1")
_EVICTED = {
    Cause.WATERMARK: "L1 was above its high watermark",
    Cause.TENANT: "the tenant was above its share of L1",
    Cause.HINTED: "an earlier request marked the object as done",
}


# A row of L1 that has the missing chunk: its key prefix, and what is known of its namespace.
Row = tuple[bytes, NamespaceRecord | None]


def elsewhere(key: bytes, mine: NamespaceRecord | None, model: str, rows: Iterable[Row]) -> MissReason | None:
    """Return why a chunk that is readable under the prefixes of `rows` is not readable under `key`; None if none of
    them says so. `mine` is the record of the key's namespace, `model` the name that its client gives."""
    best: MissReason | None = None
    for prefix, theirs in rows:
        if prefix[:NAMESPACE_BYTES] == key[:NAMESPACE_BYTES]:
            if prefix[_SALT] == key[_SALT]:
                rank = int.from_bytes(key[_RANK], "little")
                return MissReason("never_stored", f"rank {rank} did not store the chunk, but another rank or group did")
            return MissReason("other_salt", _salts(key[_SALT], prefix[_SALT]))
        if theirs is None:
            continue
        if theirs.model_name == model:
            best = MissReason("other_namespace", _difference(mine, theirs))
        elif best is None and mine is not None and mine.desc == theirs.desc:
            best = MissReason("other_namespace", f"stored under the model name {theirs.model_name!r}")
    return best


def _salts(mine: bytes, theirs: bytes) -> str:
    if mine == _PLAIN_SALT:
        return "stored with a salt, asked without one"
    if theirs == _PLAIN_SALT:
        return "stored without a salt, asked with one"
    return "stored with another salt or another order of layers"


def _difference(mine: NamespaceRecord | None, theirs: NamespaceRecord) -> str:
    if mine is None:
        return "stored under a known namespace, asked under an unknown one"
    if theirs.world_size != mine.world_size:
        return f"stored with world size {theirs.world_size}, asked with {mine.world_size}"
    found = _layout_difference(mine.desc, theirs.desc)
    return found or "stored with other weights, revision, quantisation or packing"


def _layout_difference(mine: MemoryLayoutDesc, theirs: MemoryLayoutDesc) -> str:
    if len(theirs.groups) != len(mine.groups):
        return f"stored with {len(theirs.groups)} layer groups, asked with {len(mine.groups)}"
    for number, (here, there) in enumerate(zip(mine.groups, theirs.groups, strict=True)):
        for name in GroupDesc.__struct_fields__:
            if getattr(there, name) != getattr(here, name):
                of = f" in layer group {number}" if len(mine.groups) > 1 else ""
                return f"stored with {name} {_shown(getattr(there, name))}, not {_shown(getattr(here, name))}{of}"
    return ""


def _shown(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)[:80]


# Rows of L1, the latest first, in which a missing chunk is looked for: some 5 us.
MAX_ROWS = 64


class MissFacts:
    """Gathers the facts about the first missing object of a request when it ends. Serving thread only. 10 us a miss."""

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

    def of_lookup(self, asked: PendingLookup, *, unanswered: bool) -> MissReason:
        if unanswered:
            return MissReason("timed_out", "the client did not wait for the end of the load")
        cut, most, rate = asked.priced, asked.most, asked.rate
        if cut and asked.missing and asked.missing[0] == cut.chunks < cut.found:
            times = f"loading would take {short_number(cut.load_s)} s, computing {short_number(cut.compute_s)} s"
            return MissReason("priced", times)
        if rate is not None and most is not None and (asked.missing is None or asked.missing[0] >= most):
            return MissReason("bandwidth", str(rate))
        refused = asked.grid is not None and asked.task is None and bool(self._storage.tiers.stores)
        missing = asked.missing[1] if asked.missing else _first_key(asked)
        return self._why(asked.key, missing, asked.client.session_id, asked.began, refused=refused)

    def of_retrieve(self, key: CacheKey, missing: bytes | None, session_id: int, began: float) -> MissReason:
        """Say why an object that a RETRIEVE needs was missing in L1, None: none was; tiers are not asked then."""
        if missing is None:
            return _LOAD_REFUSED
        return self._why(key, missing, session_id, began)

    def _why(
        self, key: CacheKey, missing: bytes | None, session_id: int, began: float, *, refused: bool = False
    ) -> MissReason:
        storage = self._storage
        mine = storage.records.get(key.namespace)
        ghost = found = None
        if missing is not None:
            ghost, prefixes = storage.table.absent(missing, MAX_ROWS)
            rows = [(prefix, storage.records.get(prefix[:NAMESPACE_BYTES])) for prefix in prefixes]
            found = elsewhere(missing, mine, key.model_name, rows)
        cleared = self._tiers_cleared
        return decide(
            down=storage.tiers.trouble(began),
            refused=refused,
            ghost=ghost,
            tiers_cleared_at=max(cleared.get("", -inf), cleared.get(key.model_name, -inf)),
            elsewhere=found,
            named=mine is not None,
            from_before=session_id in self._from_before,
            up_s=storage.clock() - self._began,
        )


def _first_key(asked: PendingLookup) -> bytes | None:
    """Return a key of the first chunk in an unknown namespace, without salt, rank and layer group, of no use there."""
    key = asked.key
    first = key.start * len(key.digests) // (key.end * DIGEST_BYTES) * DIGEST_BYTES
    digest = key.digests[first : first + DIGEST_BYTES]
    unknown = bytes(PACKED_KEY_BYTES - len(key.namespace) - DIGEST_BYTES)
    return key.namespace + unknown + digest if len(digest) == DIGEST_BYTES else None
