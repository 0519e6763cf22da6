"""The engine side: what an engine integration imports. Knows no engine and no server part."""

from kvframework.client.connection import KVClient
from kvframework.client.hashing import RequestHashes
from kvframework.client.scheduler import LookupResult, SchedulerAdapter
from kvframework.client.worker import WorkerAdapter
from kvframework.messaging.curve import CurveKeys

__all__ = ["CurveKeys", "KVClient", "LookupResult", "RequestHashes", "SchedulerAdapter", "WorkerAdapter"]
