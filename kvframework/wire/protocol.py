"""The protocol as tables: its requests, versions and features, and how long a client waits for each answer. Pure."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from dataclasses import dataclass

import kvframework
from kvframework.api.keys import compute_namespace
from kvframework.api.layout import KVLayout, LayerGroup, canonical_desc, with_chunk
from kvframework.api.requests import RequestSpec
from kvframework.errors import ConfigFieldError, VersionMismatch
from kvframework.wire import messages as m
from kvframework.wire.frames import MAX_BUFFERS
from kvframework.wire.messages import PROTOCOL_VERSION, Hello, RegisterNonGpuContextPayload

_SPECS = (
    RequestSpec("HELLO", m.Hello, m.HelloReply),
    RequestSpec("GOODBYE", m.Goodbye, m.Empty),
    RequestSpec("PING", m.Ping, m.Pong),
    RequestSpec("NOOP", m.Empty, m.Empty),
    RequestSpec("GET_CHUNK_SIZE", m.GetChunkSize, m.ChunkSize),
    RequestSpec("REGISTER_KV_CACHE", m.RegisterKvCache, m.Registered, deadline_s=40.0),
    RequestSpec("REGISTER_KV_CACHE_NON_GPU_CONTEXT", m.RegisterNonGpuContextPayload, m.Registered),
    RequestSpec("UNREGISTER_KV_CACHE", m.Unregister, m.Empty, deadline_s=30.0),
    RequestSpec("STORE", m.TransferRequest, m.TransferReply, deadline_s=30.0),
    RequestSpec("RETRIEVE", m.TransferRequest, m.TransferReply, deadline_s=30.0),
    RequestSpec("GATHER_BLOCK", m.GatherBlock, m.GatheredBlock),
    RequestSpec("PREPARE_STORE", m.Prepare, m.StorePlan),
    RequestSpec("COMMIT_STORE", m.Commit, m.Committed),
    RequestSpec("ABORT", m.LeaseRef, m.Aborted),
    RequestSpec("PREPARE_RETRIEVE", m.Prepare, m.RetrievePlan),
    RequestSpec("COMMIT_RETRIEVE", m.Commit, m.RetrieveCommitted),
    RequestSpec("STORE_CPU_CHUNKS", m.StoreCpuChunks, m.ChunksStored, deadline_s=30.0, buffers=MAX_BUFFERS),
    RequestSpec("RETRIEVE_CPU_CHUNKS", m.RetrieveCpuChunks, m.ChunksSent),
    RequestSpec("LOOKUP", m.Lookup, m.LookupReply),
    RequestSpec("LOOKUP_KEYS", m.LookupKeys, m.LookupReply),
    RequestSpec("PREPARE_STORE_KEYS", m.PrepareKeys, m.StorePlan),
    RequestSpec("QUERY_PREFETCH_STATUS", m.PrefetchQuery, m.LookupReply),
    RequestSpec("FREE_LOOKUP_LOCKS", m.TicketRef, m.Freed),
    RequestSpec("END_SESSION", m.EndSession, m.SessionEnded),
    RequestSpec("CANCEL", m.Cancel, m.CancelReply, deadline_s=30.0),
    RequestSpec("CLEAR", m.Clear, m.Cleared, deadline_s=60.0),
    RequestSpec("FORGET", m.Forget, m.Forgotten, deadline_s=3600.0),
    RequestSpec("REPORT_STATUS", m.Empty, m.StatusReply),
    RequestSpec("APPLY_CONFIG", m.ApplyConfig, m.ConfigApplied, deadline_s=60.0),
    RequestSpec("DRAIN", m.Drain, m.StatusReply, deadline_s=10.0),
    RequestSpec("HAND_OVER", m.HandOver, m.Empty, deadline_s=10.0),
    RequestSpec("DUMP", m.Empty, m.DumpReply, deadline_s=10.0),
    RequestSpec("RECENT", m.Recent, m.RecentReply),
    RequestSpec("TRACE", m.Trace, m.TraceReply),
)

# Those that may be sent without a wish for an answer: they only give back.
ONE_WAY_REQUESTS = frozenset({"ABORT", "COMMIT_RETRIEVE", "FREE_LOOKUP_LOCKS", "END_SESSION"})
# Those that need the room of what their client has given back.
ROOM_REQUESTS = frozenset({"PREPARE_STORE", "PREPARE_STORE_KEYS", "STORE", "STORE_CPU_CHUNKS", "CLEAR", "FORGET"})

REQUESTS: dict[str, RequestSpec] = {spec.name: spec for spec in _SPECS}

MIN_VERSION = 1
# Named by a server that reads what 0.2 does not: requests with the id `NO_ANSWER`, `free` of LOOKUP and PING, `speed`
# and `grant` of LOOKUP, `wait_s` of LOOKUP and QUERY_PREFETCH_STATUS.
SINCE_0_3 = "0.3"
FEATURES = (SINCE_0_3,)
# Named by a server that tells routers: it wants the content of what is stored and loaded, see `ChunkContent`; of
# prompts with a salt only by the second name.
TOKEN_IDS = "token_ids"  # noqa: S105
SALTED_TOKEN_IDS = "token_ids.salted"  # noqa: S105


def offer(client: str, pid: int) -> Hello:
    return Hello(
        client=client,
        pid=pid,
        min_version=MIN_VERSION,
        max_version=PROTOCOL_VERSION,
        client_version=kvframework.__version__,
    )


def negotiate(hello: Hello, hasher_fingerprint: str) -> int:
    """The highest version that both sides speak. Raises `VersionMismatch` if there is none or the hashers differ."""
    version = min(PROTOCOL_VERSION, hello.max_version)
    if version < max(MIN_VERSION, hello.min_version):
        fact = f"the client speaks protocol versions {hello.min_version} to {hello.max_version}"
        hint = "install the same kvframework release for the engine and the server"
        raise VersionMismatch(fact, available=f"{MIN_VERSION} to {PROTOCOL_VERSION}", hint=hint)
    if hello.hasher and hello.hasher != hasher_fingerprint:
        raise VersionMismatch(
            f"the client uses the hasher {hello.hasher}",
            available=hasher_fingerprint,
            hint="configure the same hasher on both sides",
        )
    return version


# How long a client waits for each kind of call, over ipc:// and TCP; docs/deadlines.md shows it. Each deadline fits the
# value of its call: a LOOKUP holds up a scheduler, for no longer than a miss of its prompt would; a store is work that
# is done already; the time for bytes grows with their number.

SCALE_VARIABLE = "KVFRAMEWORK_DEADLINE_SCALE"
SHORTEST_SCALE, LONGEST_SCALE = 0.1, 100.0
HINT = f"on a busy node, raise deadline_scale: KVClient(deadline_scale=...), the engine's option or ${SCALE_VARIABLE}"


@dataclass(frozen=True)
class ClientDeadlines:
    """The deadlines, in seconds, `bulk_bytes_per_s` in bytes per second, and `lookup_tokens_per_s`, the prefill of an
    engine that has not said how fast it is.

    `engine_s` is how long an engine's thread waits for an answer to anything but a lookup: after it the call goes on
    without that thread, until its own deadline. A PING that is unanswered for `silent_s` puts the server in doubt;
    after `gone_s` it counts as down, but only where no liveness socket reports its end (over TCP)."""

    engine_s: float = 0.05
    lookup_s: float = 0.1
    lookup_most_s: float = 1.0
    lookup_tokens_per_s: float = 20e3
    load_s: float = 1.0
    store_s: float = 2.0
    release_s: float = 5.0
    setup_s: float = 5.0
    bulk_s: float = 5.0
    bulk_bytes_per_s: float = 20e6
    transfer_s: float = 30.0
    export_s: float = 45.0
    hello_s: float = 1.0
    ping_every_s: float = 0.2
    silent_s: float = 0.8
    gone_s: float = 10.0

    def of(self, request: str) -> float:
        """The deadline of a request by its name, in seconds; `setup_s` for a plugin's."""
        return float(getattr(self, KINDS.get(request, "setup_s")))

    def of_lookup(self, prefill_s: float) -> float:
        """The deadline of a LOOKUP whose hit saves so many seconds of prefill, which a miss costs."""
        return min(self.lookup_s + prefill_s, max(self.lookup_most_s, self.lookup_s))

    def of_bulk(self, nbytes: int) -> float:
        """The deadline of a request that moves `nbytes` over the wire, in seconds."""
        return self.bulk_s + nbytes / self.bulk_bytes_per_s

    def scaled(self, scale: float) -> ClientDeadlines:
        """A copy with the waits for a server's loop multiplied by `scale`. Deadlines that must outlast one of the
        server's own stay unchanged, and so does the pace of PINGs."""
        scaled = {name: value * scale for name, value in vars(self).items() if name not in NOT_SCALED}
        return dataclasses.replace(self, **scaled)


LOCAL = ClientDeadlines()
TCP = ClientDeadlines(lookup_s=0.3, load_s=3.0, store_s=5.0, setup_s=10.0, hello_s=3.0, ping_every_s=0.5, silent_s=1.5)
# The kinds of requests; others are setup. STORE_CPU_CHUNKS: its query for missing objects; bytes take `of_bulk`.
KINDS = {
    **dict.fromkeys(("LOOKUP", "LOOKUP_KEYS", "QUERY_PREFETCH_STATUS"), "lookup_s"),
    **dict.fromkeys(("FREE_LOOKUP_LOCKS", "END_SESSION", "ABORT"), "release_s"),
    **dict.fromkeys(("PREPARE_RETRIEVE", "COMMIT_RETRIEVE"), "load_s"),
    **dict.fromkeys(("PREPARE_STORE", "PREPARE_STORE_KEYS", "COMMIT_STORE", "STORE_CPU_CHUNKS"), "store_s"),
    **dict.fromkeys(("STORE", "RETRIEVE"), "transfer_s"),
}
NOT_SCALED = ("lookup_tokens_per_s", "bulk_bytes_per_s", "transfer_s", "export_s", "ping_every_s")


def deadlines_for(endpoint: str, scale: float | None = None) -> ClientDeadlines:
    """The deadlines for `endpoint`. `scale` None: $KVFRAMEWORK_DEADLINE_SCALE, else 1. Raises `ConfigFieldError`."""
    given: object = (os.environ.get(SCALE_VARIABLE) or "1") if scale is None else scale
    value = math.nan
    if scale is None or isinstance(scale, (int, float)):  # callers are not all type-checked
        with contextlib.suppress(ValueError):
            value = float(str(given))
    if not SHORTEST_SCALE <= value <= LONGEST_SCALE:
        raise ConfigFieldError(
            f"{given!r} is not a factor for deadlines",
            where=f"${SCALE_VARIABLE}" if scale is None else "deadline_scale",
            available=f"{SHORTEST_SCALE:g} to {LONGEST_SCALE:g}",
            hint="1 is the default, 2 makes deadlines twice as long",
        )
    return (TCP if endpoint.startswith("tcp://") else LOCAL).scaled(value)


# The meaning of the eight-field registration, which engine and server both compute: neither sends it to the other.


def non_gpu_layout(payload: RegisterNonGpuContextPayload, chunk_size: int = 0, least_chunk: int = 0) -> KVLayout:
    """One layer group in canonical form; the number of blocks is not declared. `chunk_size` and `least_chunk` are the
    server's, as in HELLO's reply. Raises `BadLayout` / `BadDtype`."""
    group = LayerGroup(
        num_layers=payload.num_layers,
        block_size=payload.block_size,
        heads=1,
        head_dim=payload.hidden_dim_size,
        dtype=payload.dtype_str,
        planes=1 if payload.use_mla else 2,
    )
    return with_chunk(KVLayout("canonical", (group,)), least_chunk, chunk_size)


def non_gpu_namespace(
    payload: RegisterNonGpuContextPayload, hasher_fingerprint: str, chunk_size: int, least_chunk: int = 0
) -> bytes:
    """The 16-byte namespace. The chunks: as in HELLO's reply. Raises `BadLayout` and `BadDtype`."""
    return compute_namespace(
        model=payload.model_name,
        desc=canonical_desc(non_gpu_layout(payload, chunk_size, least_chunk), chunk_size),
        hasher_fingerprint=hasher_fingerprint,
        world_size=payload.world_size,
    )


# The natural order of the names of layers, in which numbers in a text compare as numbers. Pure.


def natural(name: str) -> tuple[list[tuple[str, int, str]], str]:
    """Alternate texts and numbers, numbers without leading zeros; then the name itself, since "1" and "01" differ."""
    parts = re.split(r"([0-9]+)", name)
    numbers = [number.lstrip("0") for number in (*parts[1::2], "")]
    return [(text, len(number), number) for text, number in zip(parts[::2], numbers, strict=True)], name
