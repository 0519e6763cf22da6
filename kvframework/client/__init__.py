"""The engine side: what an engine integration imports. Knows no engine and no server part."""

from kvframework.client.connection import KVClient
from kvframework.client.hashing import RequestHashes
from kvframework.client.scheduler import LookupResult, SchedulerAdapter
from kvframework.client.worker import WorkerAdapter

__all__ = ["KVClient", "LookupResult", "RequestHashes", "SchedulerAdapter", "WorkerAdapter"]
