"""Owns the payload structs of the core's requests and responses. They evolve by adding defaulted fields only.

A field that has its default is left out on the wire, so a default means the same for ever and never follows from a
version. `tests/golden` holds what every release wrote. Counts are bounded here, before anything is decoded for
them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvframework.api import (
    ArenaRange,
    CacheKey,
    KVLayout,
    MemoryLayoutDesc,
    Message,
    StoreOutcome,
)
from kvframework.api.layout import MAX_GROUPS

PROTOCOL_VERSION = 1
MAX_HANDLES = 4096
# Ranges that one plan may hold.
MAX_RANGES = 1 << 16
# Of what a client says that it lost: its error codes, the length of one, and what any count may be.
MAX_LOST, MAX_LOST_CODE, MOST_LOST = 16, 64, 1 << 48

InstanceId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Names = Annotated[tuple[str, ...], msgspec.Meta(max_length=256)]
PerGroup = Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_GROUPS)]
LostCount = Annotated[int, msgspec.Meta(ge=0, le=MOST_LOST)]
Ranges = Annotated[tuple[ArenaRange, ...], msgspec.Meta(max_length=MAX_RANGES)]


class Empty(Message, frozen=True):
    """No payload."""


class Hello(Message, frozen=True):
    """The first request on every connection. `session` joins a further socket to a session; `replaces` names a session
    of the same client that is to end first, because its connection was lost; `min_version` and `max_version` bound what
    the client speaks; `hasher` is a fingerprint, "" to take the server's; `client_version` is its release.

    Read before anything is agreed upon, so every version reads every other's: `client` and `pid` stay as they are, and
    who does not tell its versions speaks 1.
    """

    client: str
    pid: int
    min_version: int = 1
    max_version: int = 1
    capabilities: Names = ()
    session: bytes = b""
    hasher: str = ""
    replaces: bytes = b""
    client_version: str = ""


class HelloReply(Message, frozen=True):
    """`session` names the client session (16 secret bytes, presented on the liveness socket). `liveness` is the path of
    that socket, "" when there is none (over TCP). `boot_id` changes with every start of a server, `server_version` is
    its release."""

    version: int
    boot_id: bytes
    session: bytes
    chunk_size: Annotated[int, msgspec.Meta(ge=1)]
    hasher: str
    hasher_fingerprint: str
    transports: Names
    layouts: Names
    capabilities: Names = ()
    liveness: str = ""
    arena_bytes: int = 0
    server_version: str = ""


class Goodbye(Message, frozen=True):
    """GOODBYE ends the session. A client that cannot use this server says why, with the error's code: the server's
    operator is to know as well."""

    code: str = ""
    reason: str = ""


class Lost(Message, frozen=True):
    """Calls of a client that failed with the error `code`, since its session began: each lookup was a miss, each load
    was computed, each store was not made or nobody knows. `nbytes` is what the loads and stores were to move."""

    code: Annotated[str, msgspec.Meta(max_length=MAX_LOST_CODE)]
    lookups: LostCount = 0
    loads: LostCount = 0
    stores: LostCount = 0
    nbytes: LostCount = 0


class Ping(Message, frozen=True):
    """`lost` is all of this session, by code; () if nothing came to it since the last one that was answered."""

    lost: Annotated[tuple[Lost, ...], msgspec.Meta(max_length=MAX_LOST)] = ()


class Pong(Message, frozen=True):
    boot_id: bytes


class GetChunkSize(Message, frozen=True):
    """`namespace` b"": the configured chunk size; else the chunk of that registered namespace."""

    namespace: bytes = b""


class ChunkSize(Message, frozen=True):
    chunk_size: Annotated[int, msgspec.Meta(ge=1)]


class RegisterKvCache(Message, frozen=True):
    """Registers an instance with a declared layout. `handles` come from the transport's engine half."""

    instance_id: InstanceId
    model_name: str
    world_size: int
    rank: int
    namespace: bytes
    transport: str
    layout: KVLayout
    handles: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_HANDLES)] = ()


class RegisterNonGpuContextPayload(Message, frozen=True):
    """The eight scalars that say: one layer group, objects in canonical form `[planes, layers, tokens, hidden]`.

    `hidden_dim_size` is the elements of one token, one layer, one plane; `use_mla` means one latent plane instead of
    K and V. The namespace follows from them, see `kvframework.wire.non_gpu`.
    """

    instance_id: InstanceId
    model_name: str
    world_size: int
    block_size: int
    num_layers: int
    hidden_dim_size: int
    dtype_str: str
    use_mla: bool


class Registered(Message, frozen=True):
    """Both registrations' response."""

    namespace: bytes
    desc: MemoryLayoutDesc


class Unregister(Message, frozen=True):
    instance_id: InstanceId


class TransferRequest(Message, frozen=True):
    """STORE and RETRIEVE of a server-driven transport. `block_ids` is packed little-endian u32, one frame of bytes per
    layer group; `event` is the transport's own handle of an event to wait for before the engine's memory is touched."""

    key: CacheKey
    instance_id: InstanceId
    block_ids: PerGroup
    event: bytes = b""
    skip_first_n_tokens: int = 0


class GatherBlock(Message, frozen=True):
    """GATHER_BLOCK of a server-driven transport, for the canary: one block id per layer group, packed like `block_ids`
    of a transfer, with one id each."""

    instance_id: InstanceId
    block_ids: PerGroup
    event: bytes = b""


class GatheredBlock(Message, frozen=True):
    """The canonical bytes `[planes, layers, slots per block, hidden]` of one block per layer group."""

    groups: PerGroup


class TransferReply(Message, frozen=True):
    ok: bool
    outcome: StoreOutcome = StoreOutcome()
    reason: str = ""


class Prepare(Message, frozen=True):
    """PREPARE_STORE and PREPARE_RETRIEVE. `first_chunks`, of a store only: how many chunks at the beginning of the
    range are not stored, per layer group; () for none. Only a window or state may leave out any."""

    key: CacheKey
    instance_id: InstanceId
    first_chunks: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()


class StorePlan(Message, frozen=True):
    """The answer to PREPARE_STORE: write `ranges`, then commit `lease`.

    `lease` is "" when there is nothing to write. The ranges belong to the caller until COMMIT, ABORT or its end; after
    `lease_s` seconds they are quarantined: still the caller's to write, but never published.
    """

    lease: str
    ranges: Ranges
    outcome: StoreOutcome
    lease_s: float = 0.0


class RetrievePlan(Message, frozen=True):
    """The answer to PREPARE_RETRIEVE: read `ranges`, then commit `lease`. Empty and `hit` False when anything is
    missing.

    The ranges are pinned for `lease_s` seconds; COMMIT_RETRIEVE says whether they were pinned throughout.
    """

    hit: bool
    lease: str = ""
    ranges: Ranges = ()
    lease_s: float = 0.0
    reason: str = ""


class LeaseRef(Message, frozen=True):
    """COMMIT_STORE, ABORT and COMMIT_RETRIEVE."""

    lease: str


class Committed(Message, frozen=True):
    """COMMIT_STORE: what became of the lease's objects."""

    outcome: StoreOutcome


class RetrieveCommitted(Message, frozen=True):
    """COMMIT_RETRIEVE: whether the pins held throughout."""

    held: bool


class Aborted(Message, frozen=True):
    freed: int


class StoreCpuChunks(Message, frozen=True):
    """STORE_CPU_CHUNKS: raw objects behind the payload, one buffer each.

    `objects` says which, in order: ascending packed u32 that count chunk by chunk from the key's `start`, in each chunk
    by layer group. Without objects and buffers it is a question: what is missing?
    """

    key: CacheKey
    instance_id: InstanceId
    objects: bytes = b""


class ChunksStored(Message, frozen=True):
    """What became of the objects that were sent. To a question: how many are present, and the others in `missing`,
    packed like `objects`; what another is writing right now counts as missing."""

    outcome: StoreOutcome
    missing: bytes = b""


class RetrieveCpuChunks(Message, frozen=True):
    """RETRIEVE_CPU_CHUNKS: the bytes of objects that PREPARE_RETRIEVE pinned under `lease`; `objects` are packed u32
    positions in its `ranges`."""

    lease: str
    objects: bytes


class ChunksSent(Message, frozen=True):
    """One raw buffer behind it for each object that was asked for, in order; none if `held` is False: the pins have
    lapsed. Only COMMIT_RETRIEVE tells whether they held until all was received."""

    held: bool


class Lookup(Message, frozen=True):
    """ONE key, worker id None. The hit counts from `key.start`."""

    key: CacheKey


class LookupReply(Message, frozen=True):
    """`hit_tokens` from the key's `start`, pinned under `ticket` ("" when nothing is pinned or under way).

    `pending` True: L2 is being asked; poll QUERY_PREFETCH_STATUS with the ticket.
    """

    hit_tokens: int
    ticket: str = ""
    pending: bool = False


class TicketRef(Message, frozen=True):
    """QUERY_PREFETCH_STATUS and FREE_LOOKUP_LOCKS."""

    ticket: str


class Freed(Message, frozen=True):
    pins: int


class EndSession(Message, frozen=True):
    """Ends all that the client holds under a request id; with "" all that it holds (it is going away)."""

    request_id: str = ""


class SessionEnded(Message, frozen=True):
    leases: int
    tickets: int


class Cancel(Message, frozen=True):
    """Cancels the server-driven transfer that the same client sent as message `request`, answered only once the server
    touches its blocks no more; or the load that a LOOKUP started, by its `ticket`, whose pins end too."""

    request: int = 0
    ticket: str = ""


class CancelReply(Message, frozen=True):
    """`found` False: it had ended before."""

    found: bool


class Clear(Message, frozen=True):
    """Drops what L1 holds and nobody uses; `l2` also what L2 holds of the objects dropped here."""

    l2: bool = False


class Cleared(Message, frozen=True):
    objects: int
    in_use: int


class StatusReply(Message, frozen=True):
    """The JSON document that `kvframework status --json` prints, see docs/architecture.md."""

    document: bytes


__all__ = [
    "PROTOCOL_VERSION",
    "Aborted",
    "Cancel",
    "CancelReply",
    "ChunkSize",
    "ChunksSent",
    "ChunksStored",
    "Clear",
    "Cleared",
    "Committed",
    "Empty",
    "EndSession",
    "Freed",
    "GatherBlock",
    "GatheredBlock",
    "GetChunkSize",
    "Goodbye",
    "Hello",
    "HelloReply",
    "LeaseRef",
    "Lookup",
    "LookupReply",
    "Lost",
    "Ping",
    "Pong",
    "Prepare",
    "RegisterKvCache",
    "RegisterNonGpuContextPayload",
    "Registered",
    "RetrieveCommitted",
    "RetrieveCpuChunks",
    "RetrievePlan",
    "SessionEnded",
    "StatusReply",
    "StoreCpuChunks",
    "StoreOutcome",
    "StorePlan",
    "TicketRef",
    "TransferReply",
    "TransferRequest",
    "Unregister",
]
