"""The core's request table: every request of the protocol, its payload, its response, its deadline."""

from __future__ import annotations

from kvframework.api.requests import RequestSpec
from kvframework.wire import messages as m
from kvframework.wire.frames import MAX_BUFFERS

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
    RequestSpec("QUERY_PREFETCH_STATUS", m.PrefetchQuery, m.LookupReply),
    RequestSpec("FREE_LOOKUP_LOCKS", m.TicketRef, m.Freed),
    RequestSpec("END_SESSION", m.EndSession, m.SessionEnded),
    RequestSpec("CANCEL", m.Cancel, m.CancelReply, deadline_s=30.0),
    RequestSpec("CLEAR", m.Clear, m.Cleared, deadline_s=60.0),
    RequestSpec("REPORT_STATUS", m.Empty, m.StatusReply),
    RequestSpec("APPLY_CONFIG", m.ApplyConfig, m.ConfigApplied, deadline_s=60.0),
    RequestSpec("HAND_OVER", m.HandOver, m.Empty, deadline_s=10.0),
    RequestSpec("DUMP", m.Empty, m.DumpReply, deadline_s=10.0),
    RequestSpec("RECENT", m.Recent, m.RecentReply),
    RequestSpec("TRACE", m.Trace, m.TraceReply),
)

# Those that may be sent without a wish for an answer: they only give back.
ONE_WAY_REQUESTS = frozenset({"ABORT", "COMMIT_RETRIEVE", "FREE_LOOKUP_LOCKS", "END_SESSION"})
# Those that need the room of what their client has given back.
ROOM_REQUESTS = frozenset({"PREPARE_STORE", "STORE", "STORE_CPU_CHUNKS", "CLEAR"})

REQUESTS: dict[str, RequestSpec] = {spec.name: spec for spec in _SPECS}
