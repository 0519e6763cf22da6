"""The payload structs of the core's requests and responses. They evolve by adding defaulted fields only.

A field that has its default is left out on the wire, so a default means the same for ever and never follows from a
version. Counts are bounded here, before anything is decoded for them.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from kvframework.api.keys import CacheKey, ChunkContent
from kvframework.api.layout import MAX_GROUPS, KVLayout, MemoryLayoutDesc
from kvframework.api.listener import Finished
from kvframework.api.plugin import Message
from kvframework.api.transport import ArenaRange, StoreOutcome
from kvframework.pricing import EngineSpeed
from kvframework.status import MAX_RECENT, RecentReply

__all__ = ["MAX_RECENT", "Finished", "RecentReply"]  # beside what is defined here

PROTOCOL_VERSION = 1
MAX_HANDLES = 4096
MAX_RANGES = 1 << 16  # of one plan
# Bounds for a client's report of losses: its error codes, the length of one, and the largest count.
MAX_LOST, MAX_LOST_CODE, MOST_LOST = 16, 64, 1 << 48
MAX_FREED = 64  # tickets and grants that one message frees
# Instances for which one LOOKUP may ask for grants, and the objects of all grants that one answer has.
MAX_GRANTS, MAX_GRANTED = 64, 4096
MAX_SALTS = 4096  # of one order to forget
MAX_TRACED = 1024  # lookups of a trace that one answer holds
MAX_WAIT_S = 1.0  # for which an answer about a lookup may be held back

InstanceId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Names = Annotated[tuple[str, ...], msgspec.Meta(max_length=256)]
PerGroup = Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_GROUPS)]
LostCount = Annotated[int, msgspec.Meta(ge=0, le=MOST_LOST)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Tickets = Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_FREED)]
WaitSeconds = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_WAIT_S)]
Ranges = Annotated[tuple[ArenaRange, ...], msgspec.Meta(max_length=MAX_RANGES)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0)]


class Empty(Message, frozen=True):
    """No payload."""


class Hello(Message, frozen=True):
    """The first request on every connection. `session` joins a further socket to a session; `replaces` names a lost
    session of the same client, which ends first; `min_version` and `max_version` bound the versions that the client
    speaks; `hasher` is a fingerprint, "" to take the server's; `client_version` is its release. Every version reads
    every other's: `client` and `pid` never change, and a client without versions speaks 1."""

    client: str
    pid: int
    min_version: int = 1
    max_version: int = 1
    session: bytes = b""
    hasher: str = ""
    replaces: bytes = b""
    client_version: str = ""


class HelloReply(Message, frozen=True):
    """`session` names the client session (16 secret bytes, presented on the liveness socket). `liveness` is the path of
    that socket, "" over TCP. `boot_id` changes with every start of a server. `features` names what an older server of
    the same protocol version would ignore; `token_ids` among them asks for the `content` of transfers,
    `token_ids.salted` for that of salted ones. `tp_lcm` and `pp_lcm` are the server's, 1 for objects named by rank.
    `least_chunk` is for `with_chunk`: the client declares the tokens of a chunk up to `chunk_size`; 0: it does not.
    """

    version: int
    boot_id: bytes
    session: bytes
    chunk_size: Positive
    hasher: str
    hasher_fingerprint: str
    transports: Names
    liveness: str = ""
    features: Names = ()
    tp_lcm: Positive = 1
    pp_lcm: Positive = 1
    least_chunk: Annotated[int, msgspec.Meta(ge=0)] = 0


class Goodbye(Message, frozen=True):
    """Ends the session. A client that cannot use this server sends the error's code and the reason."""

    code: str = ""
    reason: str = ""


class Lost(Message, frozen=True):
    """Calls of a client that failed with the error `code` in its session so far, and the bytes of loads and stores."""

    code: Annotated[str, msgspec.Meta(max_length=MAX_LOST_CODE)]
    lookups: LostCount = 0
    loads: LostCount = 0
    stores: LostCount = 0
    nbytes: LostCount = 0


# The counters of `Lost`, and those of them that count calls.
LOST_AMOUNTS = ("lookups", "loads", "stores", "nbytes")
LOST_CALLS = LOST_AMOUNTS[:3]


class Ping(Message, frozen=True):
    """`lost` is the report of this session, by code; () if nothing was added since the last one that was answered.
    `free` is that of `Lookup`."""

    lost: Annotated[tuple[Lost, ...], msgspec.Meta(max_length=MAX_LOST)] = ()
    free: Tickets = ()


class Pong(Message, frozen=True):
    """The answer to PING; `boot_id` changes with each start of the server."""

    boot_id: bytes


class GetChunkSize(Message, frozen=True):
    """`namespace` b"": the configured chunk size; else the chunk of that registered namespace."""

    namespace: bytes = b""


class ChunkSize(Message, frozen=True):
    """The answer to GET_CHUNK_SIZE, in tokens."""

    chunk_size: Positive


class RegisterKvCache(Message, frozen=True):
    """Registers an instance with a declared layout. `handles` come from the transport's engine half. `ranks`, of an
    instance whose objects are shards: the ranks that it holds, `rank` first, whose layer groups the layout lists rank
    by rank; (): `rank` alone. `model_dtype` is what the model computes in, for the status."""

    instance_id: InstanceId
    model_name: str
    world_size: int
    rank: int
    namespace: bytes
    transport: str
    layout: KVLayout
    handles: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_HANDLES)] = ()
    ranks: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()
    model_dtype: str = ""


class RegisterNonGpuContextPayload(Message, frozen=True):
    """The registration by eight scalars: one layer group, objects in canonical form `[planes, layers, tokens, hidden]`.
    `hidden_dim_size` is the elements of one token, one layer, one plane; `use_mla` means one latent plane instead of K
    and V. The namespace follows from them, see `kvframework.wire.protocol`."""

    instance_id: InstanceId
    model_name: str
    world_size: int
    block_size: int
    num_layers: int
    hidden_dim_size: int
    dtype_str: str
    use_mla: bool


class Registered(Message, frozen=True):
    """The response to both registrations."""

    namespace: bytes
    desc: MemoryLayoutDesc


class Unregister(Message, frozen=True):
    """The end of an instance; the server frees its memory mappings."""

    instance_id: InstanceId


class TransferRequest(Message, frozen=True):
    """STORE and RETRIEVE of a server-driven transport. `block_ids` is packed little-endian u32, per layer group; the
    transport's `event` is waited for first. `content` is that of the key's tokens, for a server that asks for it."""

    key: CacheKey
    instance_id: InstanceId
    block_ids: PerGroup
    event: bytes = b""
    skip_first_n_tokens: int = 0
    content: ChunkContent | None = None


class GatherBlock(Message, frozen=True):
    """GATHER_BLOCK, for the canary: one block id per layer group, each packed like `block_ids` of a transfer."""

    instance_id: InstanceId
    block_ids: PerGroup
    event: bytes = b""


class GatheredBlock(Message, frozen=True):
    """The canonical bytes `[planes, layers, slots per block, hidden]` of one block per layer group."""

    groups: PerGroup


class TransferReply(Message, frozen=True):
    """The end of a transfer: whether all objects moved, else the reason."""

    ok: bool
    outcome: StoreOutcome = StoreOutcome()
    reason: str = ""


class Prepare(Message, frozen=True):
    """PREPARE_STORE and PREPARE_RETRIEVE. `first_chunks`, of a store only: how many chunks at the beginning of the
    range a window or state leaves out, per layer group; () for none."""

    key: CacheKey
    instance_id: InstanceId
    first_chunks: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()


class StorePlan(Message, frozen=True):
    """The answer to PREPARE_STORE: write `ranges`, then commit `lease`, which is "" when there is nothing to write. The
    ranges belong to the caller until COMMIT, ABORT or its end; after `lease_s` seconds they are quarantined: still the
    caller's to write, but never published."""

    lease: str
    ranges: Ranges
    outcome: StoreOutcome
    lease_s: float = 0.0


class RetrievePlan(Message, frozen=True):
    """The answer to PREPARE_RETRIEVE: read `ranges`, then commit `lease`. Empty and `hit` False when anything is
    missing. The ranges are pinned for `lease_s` seconds; COMMIT_RETRIEVE says whether they were pinned throughout."""

    hit: bool
    lease: str = ""
    ranges: Ranges = ()
    lease_s: float = 0.0
    reason: str = ""


class LeaseRef(Message, frozen=True):
    """ABORT."""

    lease: str


class Commit(Message, frozen=True):
    """COMMIT_STORE and COMMIT_RETRIEVE. `content` is that of the prepared key's tokens, for a server that asks for it:
    routers hear of the objects by it. `took_s`, of a load by a grant, whose begin the server does not see: its time."""

    lease: str
    content: ChunkContent | None = None
    took_s: Seconds = 0.0


class Committed(Message, frozen=True):
    """COMMIT_STORE."""

    outcome: StoreOutcome


class RetrieveCommitted(Message, frozen=True):
    """COMMIT_RETRIEVE: True if the pins held throughout."""

    held: bool


class Aborted(Message, frozen=True):
    """The answer to ABORT: the number of freed reservations."""

    freed: int


class StoreCpuChunks(Message, frozen=True):
    """STORE_CPU_CHUNKS: raw objects behind the payload, one buffer each. `objects` names them in order: ascending
    packed u32 that count chunk by chunk from the key's `start`, in each chunk by layer group. Without objects and
    buffers the request asks for the missing objects. `content` is that of the key's tokens, if the server asks."""

    key: CacheKey
    instance_id: InstanceId
    objects: bytes = b""
    content: ChunkContent | None = None


class ChunksStored(Message, frozen=True):
    """The outcome of the objects that were sent. For a query: the number of present objects, and the others in
    `missing`, packed like `objects`; an object that another client is writing counts as missing."""

    outcome: StoreOutcome
    missing: bytes = b""


class RetrieveCpuChunks(Message, frozen=True):
    """RETRIEVE_CPU_CHUNKS: objects pinned under `lease`; `objects` are packed u32 positions in its plan."""

    lease: str
    objects: bytes


class ChunksSent(Message, frozen=True):
    """One raw buffer behind it for each requested object, in order; none if `held` is False: the pins have lapsed. Only
    COMMIT_RETRIEVE says whether they held until all was received."""

    held: bool


class Lookup(Message, frozen=True):
    """ONE key, worker id None. The hit counts from `key.start`. The answer is held back until it is known if L2 has
    more than L1, for `wait_s` at most; the load of that is not waited for. With a `speed` the hit is cut where the
    engine computes the rest sooner than a tier loads it. The tickets `free` that have not ended do first, as by
    FREE_LOOKUP_LOCKS, and the leases of unused grants. `grant` are the instances for whose loads the hit is prepared at
    once, as by PREPARE_RETRIEVE. All but `key` are for servers of 0.3 or later."""

    key: CacheKey
    wait_s: WaitSeconds = 0.0
    speed: EngineSpeed | None = None
    free: Tickets = ()
    grant: Annotated[tuple[InstanceId, ...], msgspec.Meta(max_length=MAX_GRANTS)] = ()


class KeyGroup(Message, frozen=True):
    """Keys of one layer group, of consecutive chunks of `tokens` tokens from chunk `first` of the prompt on: packed
    digests. `window`: how many tokens before its end a hit needs of this group, 0 for all. An `aligned` group lets a
    hit end only where one of its chunks ends."""

    digests: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    tokens: Positive
    first: Annotated[int, msgspec.Meta(ge=0)] = 0
    window: Annotated[int, msgspec.Meta(ge=0)] = 0
    aligned: bool = False


KeyGroups = Annotated[tuple[KeyGroup, ...], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]


class LookupKeys(Lookup, frozen=True, kw_only=True):
    """A LOOKUP of an engine that names its objects itself: `groups` in place of the key's content, in the order of the
    registration. The objects of a grant are counted group by group."""

    groups: KeyGroups


class PrepareKeys(Message, frozen=True):
    """PREPARE_STORE for the objects of `groups`. In the plan's ranges `chunk` counts from the first of its group."""

    key: CacheKey
    instance_id: InstanceId
    groups: KeyGroups


class Grant(Message, frozen=True):
    """The objects of one instance that a LOOKUP has found, pinned under a `lease` of the session that registered the
    instance: it reads them, then sends COMMIT_RETRIEVE. `offsets` are their places in the arena, packed little-endian
    u64. `objects` names them in the same order, like those of `StoreCpuChunks`; b"" for all."""

    instance_id: InstanceId
    lease: str
    offsets: bytes
    objects: bytes = b""


class LookupReply(Message, frozen=True):
    """`hit_tokens` from the key's `start`, pinned under `ticket` ("" when nothing is pinned or in progress). `pending`:
    a load from L2 is in progress, and the hit grows with what arrives; ask by QUERY_PREFETCH_STATUS. `grants`, of an
    answer that is not pending: those that were asked for, pinned for `lease_s` seconds, whatever becomes of the ticket.
    An instance without one prepares its load."""

    hit_tokens: int
    ticket: str = ""
    pending: bool = False
    grants: Annotated[tuple[Grant, ...], msgspec.Meta(max_length=MAX_GRANTS)] = ()
    lease_s: float = 0.0


class PrefetchQuery(Message, frozen=True):
    """QUERY_PREFETCH_STATUS. The answer is held back until the load has ended, for `wait_s` at most; with a `more_than`
    of 0 or more only until the hit is longer than so many tokens."""

    ticket: str
    wait_s: WaitSeconds = 0.0
    more_than: int = -1


class TicketRef(Message, frozen=True):
    """FREE_LOOKUP_LOCKS."""

    ticket: str


class Freed(Message, frozen=True):
    """The answer to FREE_LOOKUP_LOCKS: the number of released pins."""

    pins: int


class EndSession(Message, frozen=True):
    """Ends everything that the client holds under a request id; with "" everything that it holds at all."""

    request_id: str = ""


class SessionEnded(Message, frozen=True):
    """The answer to END_SESSION: the number of ended leases and tickets."""

    leases: int
    tickets: int


class Cancel(Message, frozen=True):
    """Cancels the server-driven transfer that the same client sent as message `request`, answered only once the server
    no longer touches its blocks; or the load that a LOOKUP started, by its `ticket`, whose pins end too."""

    request: int = 0
    ticket: str = ""


class CancelReply(Message, frozen=True):
    """`found` False: it had ended before."""

    found: bool


class Clear(Message, frozen=True):
    """Drops the unused objects of L1, of all models or of `model`; `l2` also deletes them, and all that a tier lists,
    from L2. Clients on the server's node only."""

    l2: bool = False
    model: str = ""


class Cleared(Message, frozen=True):
    """`objects` of `nbytes` left L1, where `in_use` are pinned and stay; `l2_objects` of `l2_bytes` left L2. `unlisted`
    names the tiers that cannot list their values: what L1 did not hold stays there."""

    objects: int
    in_use: int
    nbytes: int = 0
    l2_objects: int = 0
    l2_bytes: int = 0
    unlisted: Names = ()


class Forget(Message, frozen=True):
    """Deletes the objects that all of the given fields name from L1 and every tier, and overwrites what L1 has free:
    those of a `tenant`, of `salts`, of a `model`, of a `namespace` (16 bytes), of a `conversation` that requests have
    named, or of the chunks of a prompt, by its `tokens` (packed u32) or packed `digests`, under any salt and namespace.
    Waits up to `wait_s` for the ends of uses. With `tenant`, `salts` are further ones of this tenant: a server knows
    only those that requests have used since its start. Clients on the server's node only."""

    tenant: str = ""
    salts: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_SALTS)] = ()
    model: str = ""
    namespace: bytes = b""
    conversation: str = ""
    tokens: bytes = b""
    digests: bytes = b""
    wait_s: Annotated[float, msgspec.Meta(ge=0.0, le=600.0)] = 5.0


class PlaceForgotten(Message, frozen=True):
    """What left one place, `L1` or a tier: `objects` of `nbytes`. `left` of those that the order names stay, counted
    after the deletion, -1 for an unknown number, and `why` says the reason."""

    place: str
    objects: int = 0
    nbytes: int = 0
    left: int = 0
    why: str = ""


class Forgotten(Message, frozen=True):
    """The receipt of a FORGET: its `places`, the `erased_bytes` of L1 that were free and are zeros now, and the
    `reserved_bytes` of L1 that writers were filling and that are not. `unknown_salts`: under how many salts tiers hold
    values of no tenant that the server knows; it knows the salts of a tenant that requests have used since its
    start."""

    places: tuple[PlaceForgotten, ...]
    erased_bytes: int = 0
    reserved_bytes: int = 0
    unknown_salts: int = 0


class ApplyConfig(Message, frozen=True):
    """Changes the server's configuration to the merged layers in `config`, a JSON document with the tables of a TOML
    file; `source` names them in errors. Nothing is changed with `dry_run`, or if any change needs a restart. For
    processes of the server's own user only."""

    config: bytes
    source: str
    dry_run: bool = False


class Drain(Message, frozen=True):
    """Has the server write what only L1 holds to its tiers within that time, and end. The answer comes at once, and is
    `status.Drain` as JSON: ask again until it is `done`. Processes of the server's own user on its node only."""

    within_s: Annotated[float, msgspec.Meta(ge=0, le=3600.0)]


class HandOver(Message, frozen=True):
    """Ends the server for a next one, which listens at the Unix socket `path`: there it gets the arena and the journal
    of L1, as descriptors, before the answer. With `confirms` the next one sends a byte there once it can use them, and
    the server ends only then. `since`: when the keeper of the next one began, in seconds of the machine's monotonic
    clock, if that is known; a server whose keeper began later refuses, so that a pod never takes L1 back from the one
    that has replaced it. Processes of the server's own user on its node only."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=107)]
    confirms: bool = False
    since: Seconds = math.inf


class ConfigChange(Message, frozen=True):
    """A key, such as `l2.0.timeout_s`, with its values as TOML, "" if it is not set, and "***" for secrets. `now`: it
    can change while the server runs."""

    key: str
    old: str
    new: str
    now: bool


class ConfigApplied(Message, frozen=True):
    """The differences between the running configuration and the other one; `applied` says whether that is in force."""

    changes: tuple[ConfigChange, ...]
    applied: bool


class DumpReply(Message, frozen=True):
    """The server's part of `kvframework dump`, a JSON document. For processes of the server's own user only."""

    document: bytes


class Recent(Message, frozen=True):
    """RECENT: the oldest `most` finished requests with a number above `after`, or those of `request_id` ("" for all);
    with `traced` only those with a trace, numbered by themselves. For clients on the server's node only."""

    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    most: Annotated[int, msgspec.Meta(ge=0, le=MAX_RECENT)] = MAX_RECENT
    request_id: str = ""
    traced: bool = False


class Trace(Message, frozen=True):
    """TRACE: the LOOKUPs with a number above `after`; with -1 none yet, but those that follow are kept for this client
    until it asks with `done`, ends, or has not asked for 30 s. Processes of the server's own user on its node only."""

    after: Annotated[int, msgspec.Meta(ge=-1)] = -1
    done: bool = False


class TracedLookup(Message, frozen=True, array_like=True):
    """A LOOKUP as a trace has it. `number` counts all of them; `began` is of the server's monotonic clock; `tenant` is
    the number of a configured one, 0 for none; `hit_tokens` count from `start`, -1 while not known. `scope` names what
    the prompt shares with no other, and `digests` its chunks from the first token to `end`, 32 bytes each."""

    number: int
    began: float
    model: str
    tenant: int
    start: int
    end: int
    hit_tokens: int
    chunk_tokens: int
    scope: bytes
    digests: bytes


class TraceReply(Message, frozen=True):
    """The answer to TRACE, the oldest first. A number up to `last` that is missing is of a LOOKUP that could not be
    kept. `more`: ask again at once."""

    records: Annotated[tuple[TracedLookup, ...], msgspec.Meta(max_length=MAX_TRACED)]
    last: int
    more: bool = False


class StatusReply(Message, frozen=True):
    """The JSON document that `kvframework status --json` prints; see docs/status.md."""

    document: bytes
