"""The ring of finished requests: what each LOOKUP, STORE and RETRIEVE asked for and got, the newest `MOST` of them.

Appending costs 0.5 us: a record is made when it is read, and formatted in other processes. It holds no salt, token,
digest or key.
Thread-safe: copies end in threads of their own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvframework.api.keys import NAMESPACE_BYTES, SALT_BYTES, CacheKey
from kvframework.api.layout import GroupDesc, MemoryLayoutDesc
from kvframework.api.requests import ClientInfo, Handler
from kvframework.api.trace import sampled_parent
from kvframework.config import TenantConfig, tenant_digest
from kvframework.errors import RequestError
from kvframework.storage.l1.departures import CAUSES, EVICTIONS, Ghost
from kvframework.storage.l2.loading import TierCall
from kvframework.storage.namespaces import NamespaceRecord
from kvframework.wire import messages as m
from kvframework.wire.protocol import REQUESTS

# Why the first missing chunk of a lookup missed. Pure: the facts are gathered elsewhere, and decided upon here.
#
# A later event explains more than an earlier one, and what the server knows of an object more than what it knows of
# others: so a tier that failed during the lookup comes first, then what became of the object, then where else its chunk
# is readable, then the server's start.

# Content of an earlier server is missed for this long after a start; later most prompts are new.
START_EXPLAINS_S = 3600.0
_EVICTIONS = frozenset(CAUSES[cause] for cause in EVICTIONS)
_PLAIN_SALT = bytes(SALT_BYTES)
_SALT = slice(NAMESPACE_BYTES, NAMESPACE_BYTES + SALT_BYTES)
_RANK = slice(_SALT.stop, _SALT.stop + 4)


class Why(NamedTuple):
    """A reason, one of `kvframework.status.REASONS`, and what else is known, in words. Of what has a time: `at`, of the
    clock of the storage; of an eviction: after how many seconds without a use, and by which model's objects."""

    reason: str
    detail: str = ""
    at: float | None = None
    idle_s: float = 0.0
    by: str = ""


class Facts(NamedTuple):
    """What is known of a missing object when the lookup ends.

    `unanswered`: the load had not ended when its client gave up. `priced`: the prices that cut the hit before it, ""
    if none did. `down`: the tier that failed since the lookup's begin,
    "" for none. `refused`: no load began, although there is a tier. `tiers_cleared_at`: when the tiers were last
    cleared of such objects. `elsewhere`: why the same chunk is readable under another name. `named`: whether the
    namespace is known. `from_before`: the client used an earlier server, whose content this one
    began without; `up_s`: seconds since its start.
    """

    unanswered: bool = False
    priced: str = ""
    down: str = ""
    refused: bool = False
    ghost: Ghost | None = None
    tiers_cleared_at: float | None = None
    elsewhere: Why | None = None
    named: bool = True
    from_before: bool = False
    up_s: float = 0.0


def decide(facts: Facts) -> Why:
    """Return the one reason that explains a miss."""
    ghost = facts.ghost
    if facts.unanswered:
        return Why("timed_out", "its client did not wait for the end of the load")
    if facts.priced:
        return Why("priced", facts.priced)
    if facts.down:
        return Why("tier_down", facts.down)
    if facts.refused:
        return Why("timed_out", "the load did not begin, as too many were under way")
    if ghost is not None:
        cleared = facts.tiers_cleared_at
        if cleared is not None and cleared >= ghost.at:
            return Why("cleared", "from L2, too", cleared)
        if ghost.cause in _EVICTIONS:
            return Why("evicted", _EVICTED.get(ghost.cause, ""), ghost.at, ghost.idle_s, ghost.by)
        return Why(ghost.cause, "", ghost.at)
    if facts.elsewhere is not None:
        return facts.elsewhere
    if facts.from_before and facts.up_s < START_EXPLAINS_S:
        return Why("server_started", "its client has used an earlier server")
    if not facts.named:
        return Why("unknown_namespace", "no instance has registered it here, and no tier knows it")
    return _NEVER_STORED


_NEVER_STORED = Why("never_stored")
# Of a load that found all its objects.
LOAD_REFUSED = Why("dropped_share", "its load was refused, as its client keeps its share of L1 from eviction")
_EVICTED = {
    "watermark": "to stay below the high watermark",
    "tenant": "by the share of its tenant",
    "hinted": "as a request had said that no one asks for it again",
}


class Row(NamedTuple):
    """A row of L1 that has the missing chunk: its key prefix, and what is known of its namespace."""

    prefix: bytes
    record: NamespaceRecord | None


def elsewhere(key: bytes, mine: NamespaceRecord | None, model: str, rows: Iterable[Row]) -> Why | None:
    """Return why a chunk that is readable under the prefixes of `rows` is not readable under `key`; None if none of
    them says so. `mine` is the record of the key's namespace, `model` the name that its client gives."""
    best: Why | None = None
    for row in rows:
        if row.prefix[:NAMESPACE_BYTES] == key[:NAMESPACE_BYTES]:
            if row.prefix[_SALT] == key[_SALT]:
                rank = int.from_bytes(key[_RANK], "little")
                return Why("never_stored", f"by rank {rank}, while another rank or layer group has it")
            return Why("other_salt", _salts(key[_SALT], row.prefix[_SALT]))
        theirs = row.record
        if theirs is None:
            continue
        if theirs.model_name == model:
            best = Why("other_namespace", _difference(mine, theirs))
        elif best is None and mine is not None and mine.desc == theirs.desc:
            best = Why("other_namespace", f"stored under the model name {theirs.model_name!r}")
    return best


def _salts(mine: bytes, theirs: bytes) -> str:
    if mine == _PLAIN_SALT:
        return "stored with a salt, asked without one"
    if theirs == _PLAIN_SALT:
        return "stored without a salt, asked with one"
    return "stored with another salt, or another order of layers"


def _difference(mine: NamespaceRecord | None, theirs: NamespaceRecord) -> str:
    """Say in what two namespaces of one model differ, theirs first."""
    if mine is None:
        return "stored under a namespace that is known here, asked under one that is not"
    if theirs.world_size != mine.world_size:
        return f"world size {theirs.world_size}, not {mine.world_size}"
    found = _layout_difference(mine.desc, theirs.desc)
    return found or "other weights, revision, quantisation or packing"


def _layout_difference(mine: MemoryLayoutDesc, theirs: MemoryLayoutDesc) -> str:
    if len(theirs.groups) != len(mine.groups):
        return f"{len(theirs.groups)} layer groups, not {len(mine.groups)}"
    for number, (here, there) in enumerate(zip(mine.groups, theirs.groups, strict=True)):
        for name in GroupDesc.__struct_fields__:
            if getattr(there, name) != getattr(here, name):
                of = f" in layer group {number}" if len(mine.groups) > 1 else ""
                return f"{name} {_shown(getattr(there, name))}, not {_shown(getattr(here, name))}{of}"
    return ""


def _shown(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)[:80]


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


MOST = m.MAX_RECENT
# Of a text that a client chose.
MAX_TEXT = 128
NOT_MISSED = Why("")


class Subject(NamedTuple):
    """Which request it is, without its content. `began` is the time of its first message, of the monotonic clock;
    `path` is how the bytes of a transfer move."""

    began: float
    client: str
    pid: int
    session_id: int
    request_id: str
    model: str
    namespace: bytes
    start: int
    asked_tokens: int
    path: str = ""
    tenant: str = ""
    trace: str = ""


def subject_of(client: ClientInfo, key: CacheKey, began: float, path: str = "", tenant: str = "") -> Subject:
    return Subject(
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


_Ends = tuple[str, int, int, int, int]
# Number, wall clock, clock, and the arguments of `add`.
_Entry = tuple[int, float, float, str, Subject, _Ends, Why, int, int, Sequence[TierCall], tuple[float, float], int]


class _Ring:
    """The newest records of a kind, not made yet, and the number of all of them so far."""

    def __init__(self) -> None:
        self.held: deque[_Entry] = deque(maxlen=MOST)
        self.last = 0

    def add(self, entry: _Entry) -> None:
        self.last += 1
        self.held.append(entry)


def _record(
    number: int,
    at: float,
    now: float,
    request: str,
    subject: Subject,
    ends: _Ends,
    why: Why,
    objects: int,
    nbytes: int,
    tier_calls: Sequence[TierCall],
    prices: tuple[float, float],
    added_tokens: int,
) -> m.Finished:
    outcome, l1_tokens, l2_tokens, missing, chunk_tokens = ends
    return m.Finished(
        number=number,
        request=request,
        at=at,
        monotonic=now,
        seconds=now - subject.began,
        request_id=subject.request_id,
        client=subject.client,
        pid=subject.pid,
        session_id=subject.session_id,
        model=subject.model,
        namespace=subject.namespace.hex(),
        outcome=outcome,
        start=subject.start,
        asked_tokens=subject.asked_tokens,
        l1_tokens=l1_tokens,
        l2_tokens=l2_tokens,
        missing=missing,
        chunk_tokens=chunk_tokens,
        reason=why.reason,
        detail=why.detail,
        cause_at=0.0 if why.at is None else at - (now - why.at),
        idle_s=why.idle_s,
        by=why.by,
        path=subject.path,
        objects=objects,
        nbytes=nbytes,
        tenant=subject.tenant,
        trace=subject.trace,
        tier_calls=tuple(m.TierCall(*call) for call in tier_calls),
        load_s=prices[0],
        compute_s=prices[1],
        added_tokens=added_tokens,
    )


class FinishedRequests:
    """The ring. `boot_id` names the server's start; `clock` is monotonic; `tenant_of` names the tenant of a salt."""

    def __init__(
        self,
        boot_id: bytes,
        clock: Callable[[], float] = time.monotonic,
        tenant_of: Callable[[str], str] = lambda _salt: "",
    ) -> None:
        self._boot_id = boot_id
        self._started_at = time.time()
        self.clock = clock
        self.tenant_of = tenant_of
        self._lock = threading.Lock()
        self._all = _Ring()
        # A flood of other requests does not push them out.
        self._traced = _Ring()

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [Handler(REQUESTS["RECENT"], self._recent, pooled=True)]

    def add(
        self,
        request: str,
        subject: Subject,
        outcome: str,
        *,
        l1_tokens: int = 0,
        l2_tokens: int = 0,
        missing: int = -1,
        chunk_tokens: int = 0,
        why: Why = NOT_MISSED,
        objects: int = 0,
        nbytes: int = 0,
        tier_calls: Sequence[TierCall] = (),
        prices: tuple[float, float] = (0.0, 0.0),
        added_tokens: int = -1,
    ) -> None:
        """Append a request that ends now. See `Finished` for the fields."""
        at, now = time.time(), self.clock()
        ends = outcome, l1_tokens, l2_tokens, missing, chunk_tokens
        # A copy: the load of a lookup that was given up goes on.
        calls = tuple(tier_calls) if subject.trace else ()
        with self._lock:
            entry = (
                self._all.last + 1,
                at,
                now,
                request,
                subject,
                ends,
                why,
                objects,
                nbytes,
                calls,
                prices,
                added_tokens,
            )
            self._all.add(entry)
            if subject.trace:
                self._traced.add(entry)

    def after(self, number: int, most: int = MOST, request_id: str = "", *, traced: bool = False) -> m.RecentReply:
        """Return the records with a number above `number`, see `Recent`."""
        with self._lock:
            ring = self._traced if traced else self._all
            last, held = ring.last, list(ring.held)
        oldest = last - len(held)
        held = held[max(number - oldest, 0) :]
        if request_id:
            held = [entry for entry in held if entry[4].request_id == request_id[:MAX_TEXT]]
        records = tuple([_record(*entry) for entry in held[:most]])
        return m.RecentReply(records, last, max(oldest - number, 0), self._boot_id, self._started_at)

    def _recent(self, client: ClientInfo, payload: m.Recent, _buffers: Sequence[memoryview]) -> m.RecentReply:
        if not client.local:
            raise RequestError(
                "only a client on this node may see finished requests", available="a client on this node, over ipc://"
            )
        return self.after(payload.after, payload.most, payload.request_id, traced=payload.traced)
