"""The engine side: the modules that an engine integration imports. Independent of any engine and of the server's
parts."""

from kvframework.api.transfer import LoadGrant
from kvframework.client.connection import KVClient
from kvframework.client.digest_memory import FileState
from kvframework.client.engine_options import EngineOptions, Seconds, engine_options
from kvframework.client.file_digests import FileDigest, digest_files
from kvframework.client.hashing import RequestHashes
from kvframework.client.model_files import WEIGHT_SUFFIXES, changed_since, fingerprint, model_files, process_started
from kvframework.client.model_identity import EngineKind, ModelFacts, model_identity
from kvframework.client.naming import KvIdentity, named_identity
from kvframework.client.read_progress import Progress
from kvframework.client.registration.canonical import CanonicalInstance, register_canonical
from kvframework.client.registration.shards import ModelPart
from kvframework.client.scheduler import LookupResult, SchedulerAdapter
from kvframework.client.tracing import current_trace
from kvframework.client.watched_calls import WatchedCall, watch_calls
from kvframework.client.worker import WorkerAdapter
from kvframework.messaging.curve import CurveKeys
from kvframework.pricing.prefill import EngineSpeed, PrefillMeter

__all__ = [
    "WEIGHT_SUFFIXES",
    "CanonicalInstance",
    "CurveKeys",
    "EngineKind",
    "EngineOptions",
    "EngineSpeed",
    "FileDigest",
    "FileState",
    "KVClient",
    "KvIdentity",
    "LoadGrant",
    "LookupResult",
    "ModelFacts",
    "ModelPart",
    "PrefillMeter",
    "Progress",
    "RequestHashes",
    "SchedulerAdapter",
    "Seconds",
    "WatchedCall",
    "WorkerAdapter",
    "changed_since",
    "current_trace",
    "digest_files",
    "engine_options",
    "fingerprint",
    "model_files",
    "model_identity",
    "named_identity",
    "process_started",
    "register_canonical",
    "watch_calls",
]
