"""The engine side: what an engine integration imports. Knows no engine and no server part."""

from kvframework.client.connection import KVClient
from kvframework.client.hashing import RequestHashes
from kvframework.client.naming import KvIdentity, named_identity
from kvframework.client.scheduler import LookupResult, SchedulerAdapter
from kvframework.client.worker import WorkerAdapter
from kvframework.messaging.curve import CurveKeys

__all__ = [
    "CurveKeys",
    "KVClient",
    "KvIdentity",
    "LookupResult",
    "RequestHashes",
    "SchedulerAdapter",
    "WorkerAdapter",
    "named_identity",
]
