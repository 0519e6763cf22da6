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
    """The empty payload."""


class Hello(Message, frozen=True):
    """The first request on every connection. `session` joins another socket to a session. `replaces` names a lost
    session of the same client; that session ends first. `min_version` and `max_version` bound the protocol versions
    that the client speaks. `hasher` is a fingerprint, or "" for the server's hasher. `client_version` is the client's
    release. The fields `client` and `pid` never change, so every server can read them."""

    client: str
    pid: int
    min_version: int = 1
    max_version: int = 1
    session: bytes = b""
    hasher: str = ""
    replaces: bytes = b""
    client_version: str = ""


class HelloReply(Message, frozen=True):
    """The answer to HELLO. `session` (16 secret bytes) names the session; the client sends it on the liveness socket,
    whose path is `liveness` ("" over TCP). `boot_id` changes with every start of the server. `features` lists
    extensions that older servers of this protocol version ignore: `token_ids` asks for the `content` of transfers,
    `token_ids.salted` also for salted ones. `tp_lcm` and `pp_lcm` are the server's options; 1: objects are named by
    rank. `least_chunk` is the least chunk, in tokens, that a client may declare up to `chunk_size`; 0: none."""

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
    """The request to end the session. A client that cannot use the server sends an error code and the reason."""

    code: str = ""
    reason: str = ""


class Lost(Message, frozen=True):
    """The calls of a session that failed with the error `code`, and the bytes of its failed loads and stores."""

    code: Annotated[str, msgspec.Meta(max_length=MAX_LOST_CODE)]
    lookups: LostCount = 0
    loads: LostCount = 0
    stores: LostCount = 0
    nbytes: LostCount = 0


# The counters of `Lost`, and those of them that count calls.
LOST_AMOUNTS = ("lookups", "loads", "stores", "nbytes")
LOST_CALLS = LOST_AMOUNTS[:3]


class Ping(Message, frozen=True):
    """The client's regular sign of life. `lost` reports the session's failed calls by code; () if nothing changed since
    the last answered report. `free` lists tickets to release, as in `Lookup`."""

    lost: Annotated[tuple[Lost, ...], msgspec.Meta(max_length=MAX_LOST)] = ()
    free: Tickets = ()


class Pong(Message, frozen=True):
    """The answer to PING; `boot_id` changes with each start of the server."""

    boot_id: bytes


class GetChunkSize(Message, frozen=True):
    """The question for the chunk size: the configured one for b"", else that of the registered `namespace`."""

    namespace: bytes = b""


class ChunkSize(Message, frozen=True):
    """The answer to GET_CHUNK_SIZE, in tokens."""

    chunk_size: Positive


class RegisterKvCache(Message, frozen=True):
    """The registration of an instance with a declared layout. `handles` come from the transport's engine half. `ranks`
    is for an instance whose objects are shards: the ranks that it holds, `rank` first; the layout lists their layer
    groups rank by rank. (): `rank` alone. `model_dtype`, the dtype of the model, appears in the status."""

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
    """The answer to both kinds of registration."""

    namespace: bytes
    desc: MemoryLayoutDesc


class Unregister(Message, frozen=True):
    """The request to end an instance. The server unmaps the instance's memory."""

    instance_id: InstanceId


class TransferRequest(Message, frozen=True):
    """STORE or RETRIEVE of a server-driven transport. `block_ids` are packed little-endian u32, per layer group. The
    server waits for the transport's `event` first. `content` describes the key's tokens, if the server asks."""

    key: CacheKey
    instance_id: InstanceId
    block_ids: PerGroup
    event: bytes = b""
    skip_first_n_tokens: int = 0
    content: ChunkContent | None = None


class GatherBlock(Message, frozen=True):
    """GATHER_BLOCK, the canary's request: one block id per layer group, packed like `block_ids` of a transfer."""

    instance_id: InstanceId
    block_ids: PerGroup
    event: bytes = b""


class GatheredBlock(Message, frozen=True):
    """The canonical bytes `[planes, layers, slots per block, hidden]` of one block per layer group."""

    groups: PerGroup


class TransferReply(Message, frozen=True):
    """The answer to a transfer: whether all objects were moved, else the reason."""

    ok: bool
    outcome: StoreOutcome = StoreOutcome()
    reason: str = ""


class Prepare(Message, frozen=True):
    """PREPARE_STORE or PREPARE_RETRIEVE. `first_chunks` (stores only) counts, per layer group, the chunks at the
    beginning of the range that a window or state leaves out; () for none."""

    key: CacheKey
    instance_id: InstanceId
    first_chunks: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()


class StorePlan(Message, frozen=True):
    """The answer to PREPARE_STORE: the client writes `ranges`, then commits `lease` ("" if there is nothing to write).
    The client owns the ranges until COMMIT, ABORT or the end of its session. After `lease_s` seconds the client may
    still write to the ranges, but the server never publishes them."""

    lease: str
    ranges: Ranges
    outcome: StoreOutcome
    lease_s: float = 0.0


class RetrievePlan(Message, frozen=True):
    """The answer to PREPARE_RETRIEVE: the client reads `ranges`, then commits `lease`. `hit` is False, and the plan
    empty, if any object is missing. The ranges are pinned for `lease_s` seconds; COMMIT_RETRIEVE answers whether the
    pins lasted until then."""

    hit: bool
    lease: str = ""
    ranges: Ranges = ()
    lease_s: float = 0.0
    reason: str = ""


class LeaseRef(Message, frozen=True):
    """ABORT: the request to release a lease."""

    lease: str


class Commit(Message, frozen=True):
    """COMMIT_STORE or COMMIT_RETRIEVE. `content` describes the key's tokens, if the server asks: routers learn of the
    objects from it. `took_s` is the duration of a load with a grant, whose start the server does not see."""

    lease: str
    content: ChunkContent | None = None
    took_s: Seconds = 0.0


class Committed(Message, frozen=True):
    """The answer to COMMIT_STORE."""

    outcome: StoreOutcome


class RetrieveCommitted(Message, frozen=True):
    """The answer to COMMIT_RETRIEVE: `held` is True if the pins lasted until the commit."""

    held: bool


class Aborted(Message, frozen=True):
    """The answer to ABORT: the number of released reservations."""

    freed: int


class StoreCpuChunks(Message, frozen=True):
    """STORE_CPU_CHUNKS: raw objects, one message buffer each after the payload. `objects` are their positions, packed
    ascending u32: chunk by chunk from the key's `start`, within a chunk by layer group. Without objects and buffers
    the request asks which objects are missing. `content` describes the key's tokens, if the server asks."""

    key: CacheKey
    instance_id: InstanceId
    objects: bytes = b""
    content: ChunkContent | None = None


class ChunksStored(Message, frozen=True):
    """The answer to STORE_CPU_CHUNKS: the outcome of the sent objects. For a query: the number of present objects, and
    the missing ones, packed like `objects`. An object that another client is writing counts as missing."""

    outcome: StoreOutcome
    missing: bytes = b""


class RetrieveCpuChunks(Message, frozen=True):
    """RETRIEVE_CPU_CHUNKS: the request for objects pinned under `lease`, as packed u32 positions in its plan."""

    lease: str
    objects: bytes


class ChunksSent(Message, frozen=True):
    """The answer to RETRIEVE_CPU_CHUNKS, followed by one raw buffer per requested object, in order. `held` False: the
    pins have expired, and no buffer follows. Only COMMIT_RETRIEVE tells whether they lasted until all was received."""

    held: bool


class Lookup(Message, frozen=True):
    """The question how many tokens of one key are cached, counted from `key.start`; its worker id is None. The server
    waits up to `wait_s` seconds for the tiers' answers, but never for their loads. With a `speed`, the server cuts the
    hit where the engine computes the rest sooner than a tier loads it. The server first releases the tickets `free`,
    as FREE_LOOKUP_LOCKS does, and the leases of unused grants. For each instance in `grant` the answer holds a plan
    of the load, as PREPARE_RETRIEVE makes it. A question `ahead` of its request is not counted, and its loads let all
    others go first. Servers before 0.3 know only `key`."""

    key: CacheKey
    wait_s: WaitSeconds = 0.0
    speed: EngineSpeed | None = None
    free: Tickets = ()
    grant: Annotated[tuple[InstanceId, ...], msgspec.Meta(max_length=MAX_GRANTS)] = ()
    ahead: bool = False


class KeyGroup(Message, frozen=True):
    """The keys of one layer group: packed digests of consecutive chunks of `tokens` tokens, from chunk `first` of the
    prompt on. A hit needs only the last `window` tokens of this group; 0 for all. With `aligned`, a hit can end only
    at the end of one of the group's chunks."""

    digests: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    tokens: Positive
    first: Annotated[int, msgspec.Meta(ge=0)] = 0
    window: Annotated[int, msgspec.Meta(ge=0)] = 0
    aligned: bool = False


KeyGroups = Annotated[tuple[KeyGroup, ...], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]


class LookupKeys(Lookup, frozen=True, kw_only=True):
    """A LOOKUP of an engine that names its own objects: `groups`, in the registration's order, replace the key's
    content. A grant numbers objects group by group."""

    groups: KeyGroups


class PrepareKeys(Message, frozen=True):
    """PREPARE_STORE for the objects of `groups`. `chunk` of the plan's ranges counts from the group's first chunk."""

    key: CacheKey
    instance_id: InstanceId
    groups: KeyGroups


class Grant(Message, frozen=True):
    """The objects that a LOOKUP found for one instance. The session that registered the instance holds the `lease`: it
    reads the objects, then sends COMMIT_RETRIEVE. `offsets` in the arena are packed little-endian u64, in bytes.
    `objects` are positions in the same order, packed like those of `StoreCpuChunks`; b"" for all."""

    instance_id: InstanceId
    lease: str
    offsets: bytes
    objects: bytes = b""


class LookupReply(Message, frozen=True):
    """The answer to LOOKUP: `hit_tokens` from the key's `start`, pinned under `ticket` ("": nothing is pinned or in
    progress). `pending`: a load from L2 runs, and the hit grows; ask with QUERY_PREFETCH_STATUS. `grants` (never in a
    pending answer) are the requested ones, pinned for `lease_s` seconds independently of the ticket. An instance
    without a grant sends PREPARE_RETRIEVE."""

    hit_tokens: int
    ticket: str = ""
    pending: bool = False
    grants: Annotated[tuple[Grant, ...], msgspec.Meta(max_length=MAX_GRANTS)] = ()
    lease_s: float = 0.0


class PrefetchQuery(Message, frozen=True):
    """QUERY_PREFETCH_STATUS: the question how far a load from L2 is. The server answers when the load has ended, when
    the hit is longer than `more_than` tokens (if 0 or more), or after `wait_s` seconds."""

    ticket: str
    wait_s: WaitSeconds = 0.0
    more_than: int = -1


class TicketRef(Message, frozen=True):
    """FREE_LOOKUP_LOCKS: the request to release the pins of a lookup."""

    ticket: str


class Freed(Message, frozen=True):
    """The answer to FREE_LOOKUP_LOCKS: the number of released pins."""

    pins: int


class EndSession(Message, frozen=True):
    """END_SESSION: the request to release all leases and tickets of one request, or of the client for ""."""

    request_id: str = ""


class SessionEnded(Message, frozen=True):
    """The answer to END_SESSION: the number of ended leases and tickets."""

    leases: int
    tickets: int


class Cancel(Message, frozen=True):
    """The request to cancel the client's server-driven transfer, by its message number `request`, or the load of a
    LOOKUP and its pins, by `ticket`. The server answers once it no longer touches the transfer's blocks."""

    request: int = 0
    ticket: str = ""


class CancelReply(Message, frozen=True):
    """The answer to CANCEL. `found` False: the transfer or load had already ended."""

    found: bool


class Clear(Message, frozen=True):
    """The request to drop L1's unused objects, of all models or of `model`. With `l2`, the server also deletes from L2
    these objects and all that a tier lists. For clients on the server's node only."""

    l2: bool = False
    model: str = ""


class Cleared(Message, frozen=True):
    """The answer to CLEAR: `objects` of `nbytes` left L1; `in_use` pinned ones stay. `l2_objects` of `l2_bytes` left
    L2. `unlisted` names the tiers that cannot list their values: they keep the values that L1 did not hold."""

    objects: int
    in_use: int
    nbytes: int = 0
    l2_objects: int = 0
    l2_bytes: int = 0
    unlisted: Names = ()


class Forget(Message, frozen=True):
    """The request to delete objects from L1 and every tier, and to zero L1's free memory. Each given field narrows the
    choice: a `tenant`, `salts`, a `model`, a `namespace` (16 bytes), a `conversation` named by requests, or a prompt's
    chunks, by its `tokens` (packed u32) or packed `digests`, under any salt and namespace. The server waits up to
    `wait_s` seconds for objects in use. A server knows only a tenant's salts that requests have used since its start;
    with `tenant`, `salts` adds others. For clients on the server's node only."""

    tenant: str = ""
    salts: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_SALTS)] = ()
    model: str = ""
    namespace: bytes = b""
    conversation: str = ""
    tokens: bytes = b""
    digests: bytes = b""
    wait_s: Annotated[float, msgspec.Meta(ge=0.0, le=600.0)] = 5.0


class PlaceForgotten(Message, frozen=True):
    """The deletions in one place, `L1` or a tier: `objects` of `nbytes`. `left` matching objects remain (-1: an unknown
    number), for the reason `why`."""

    place: str
    objects: int = 0
    nbytes: int = 0
    left: int = 0
    why: str = ""


class Forgotten(Message, frozen=True):
    """The answer to FORGET: the deletions by place, the `erased_bytes` of L1's free memory that are zeros now, and the
    `reserved_bytes` of L1 that clients were writing, which were not zeroed. `unknown_salts` counts the salts of tier
    values that belong to no known tenant; a server learns a tenant's salts from requests since its start."""

    places: tuple[PlaceForgotten, ...]
    erased_bytes: int = 0
    reserved_bytes: int = 0
    unknown_salts: int = 0


class ApplyConfig(Message, frozen=True):
    """The request to change the running configuration to `config`, a JSON document with the tables of a TOML file.
    Errors call it `source`. The server changes nothing with `dry_run`, or if any change needs a restart. For processes
    of the server's user only."""

    config: bytes
    source: str
    dry_run: bool = False


class Drain(Message, frozen=True):
    """The request to write the objects that only L1 holds to the tiers within `within_s` seconds, and to end. The
    server answers at once with `status.Drain` as JSON; ask again until it is `done`. For processes of the server's
    user on its node only."""

    within_s: Annotated[float, msgspec.Meta(ge=0, le=3600.0)]


class HandOver(Message, frozen=True):
    """The request to hand L1 over to a new server, and to end. The new server listens at the Unix socket `path` and
    receives the descriptors of arena and journal there before the answer. With `confirms`, it sends a byte once it can
    use them; the old server ends only then. `since` is when the new server's keeper started, in seconds of the
    monotonic clock. A server whose keeper started later refuses, so an old pod never takes L1 back from its
    replacement. For processes of the server's user on its node only."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=107)]
    confirms: bool = False
    since: Seconds = math.inf


class ConfigChange(Message, frozen=True):
    """A changed key, such as `l2.0.timeout_s`, with its values as TOML: "" if unset, "***" for secrets. `now`: the key
    can change while the server runs."""

    key: str
    old: str
    new: str
    now: bool


class ConfigApplied(Message, frozen=True):
    """The differences between the running and the requested configuration, and whether the latter was applied."""

    changes: tuple[ConfigChange, ...]
    applied: bool


class DumpReply(Message, frozen=True):
    """The server's part of `kvframework dump`, a JSON document. For processes of the server's user only."""

    document: bytes


class Recent(Message, frozen=True):
    """RECENT: the question for the oldest `most` finished requests with a number above `after`, or with `request_id`
    ("" for all); with `traced` only for requests with a trace, which have separate numbers. For clients on the server's
    node only."""

    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    most: Annotated[int, msgspec.Meta(ge=0, le=MAX_RECENT)] = MAX_RECENT
    request_id: str = ""
    traced: bool = False


class Trace(Message, frozen=True):
    """TRACE: the question for the LOOKUPs with a number above `after`. -1 starts the recording for this client; `done`,
    the end of the session, or 30 s without a question stop it. For processes of the server's user on its node only."""

    after: Annotated[int, msgspec.Meta(ge=-1)] = -1
    done: bool = False


class TracedLookup(Message, frozen=True, array_like=True):
    """A recorded LOOKUP. `number` counts all LOOKUPs. `began` is in seconds of the server's monotonic clock. `tenant`
    is the number of a configured tenant, 0 for none. `hit_tokens` count from `start`; -1: not known yet. Prompts share
    KV only within one `scope`. `digests` name the chunks from the first token to `end`, 32 bytes each."""

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
    """The answer to TRACE, oldest first. A missing number up to `last` is a LOOKUP that the server could not record.
    `more`: ask again at once."""

    records: Annotated[tuple[TracedLookup, ...], msgspec.Meta(max_length=MAX_TRACED)]
    last: int
    more: bool = False


class StatusReply(Message, frozen=True):
    """The JSON document that `kvframework status --json` prints; see docs/status.md."""

    document: bytes
