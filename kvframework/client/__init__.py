"""The engine side: what an engine integration imports. Independent of any engine and of the server's parts."""

from kvframework.api.transport import LoadGrant
from kvframework.client.arena_mapping import MappedArena
from kvframework.client.hashing import RequestHashes
from kvframework.client.identity import (
    WEIGHT_SUFFIXES,
    EngineKind,
    FileDigest,
    FileState,
    KvIdentity,
    ModelFacts,
    changed_since,
    digest_files,
    fingerprint,
    model_files,
    model_identity,
    named_identity,
    process_started,
)
from kvframework.client.instance import CanonicalInstance, register_canonical
from kvframework.client.integration import (
    Attachment,
    EngineOptions,
    ErrorNotes,
    Seconds,
    WatchedCall,
    current_trace,
    engine_options,
    harmless,
    watch_calls,
)
from kvframework.client.kv_client import KVClient
from kvframework.client.opaque import ArenaTicket, OpaqueInstance, OpaqueObjects, Prompt, granted_objects, map_arena
from kvframework.client.scheduler import LookupResult, SchedulerAdapter
from kvframework.client.shards import ModelPart
from kvframework.client.status_source import StatusSource, quiet_connection, server_endpoint
from kvframework.client.worker import WorkerAdapter
from kvframework.messaging.curve import CurveKeys, LoadedKeys, write_curve_pair
from kvframework.pricing import EngineSpeed, PrefillMeter
from kvframework.wire.messages import Forget, Forgotten, KeyGroup, LookupReply, PlaceForgotten

__all__ = [
    "WEIGHT_SUFFIXES",
    "ArenaTicket",
    "Attachment",
    "CanonicalInstance",
    "CurveKeys",
    "EngineKind",
    "EngineOptions",
    "EngineSpeed",
    "ErrorNotes",
    "FileDigest",
    "FileState",
    "Forget",
    "Forgotten",
    "KVClient",
    "KeyGroup",
    "KvIdentity",
    "LoadGrant",
    "LoadedKeys",
    "LookupReply",
    "LookupResult",
    "MappedArena",
    "ModelFacts",
    "ModelPart",
    "OpaqueInstance",
    "OpaqueObjects",
    "PlaceForgotten",
    "PrefillMeter",
    "Prompt",
    "RequestHashes",
    "SchedulerAdapter",
    "Seconds",
    "StatusSource",
    "WatchedCall",
    "WorkerAdapter",
    "changed_since",
    "current_trace",
    "digest_files",
    "engine_options",
    "fingerprint",
    "granted_objects",
    "harmless",
    "map_arena",
    "model_files",
    "model_identity",
    "named_identity",
    "process_started",
    "quiet_connection",
    "register_canonical",
    "server_endpoint",
    "watch_calls",
    "write_curve_pair",
]
