"""The scheduler's requests to the server: one request's digests, its lookups and their tickets.

Scheduler process, scheduler thread. A lookup waits for its short deadline at most; failures are misses.
"""

from __future__ import annotations

from typing import Protocol

from kvf_vllm.step_messages import Served
from kvframework.client import KVClient, LookupResult, RequestHashes, SchedulerAdapter
from kvframework.errors import KVFrameworkError


class LookupService(Protocol):
    """The scheduler side's access to the server."""

    def serve(self, served: Served) -> None:
        """Sets the names of content that the workers use. Called before any other method."""

    def hashes(self, request_id: str, salt: str, trace: str = "") -> RequestHashes | None:
        """A new empty digest list; `trace` is the request's traceparent. None as long as the server has never been
        reached."""

    def lookup(self, request: RequestHashes, start: int, end: int) -> LookupResult: ...

    def too_short(self, request: RequestHashes) -> None:
        """Reports a request that is not looked up, as it has no whole chunk."""

    def poll(self, result: LookupResult) -> LookupResult: ...

    def free(self, result: LookupResult) -> None: ...


class ServerLookups:
    """Lookups over a `KVClient`, which is borrowed."""

    def __init__(self, client: KVClient) -> None:
        self._client = client
        self._served: Served | None = None
        self._adapter: SchedulerAdapter | None = None

    def serve(self, served: Served) -> None:
        self._served = served
        self._adapter = SchedulerAdapter(
            self._client,
            model_name=served.model_name,
            namespace=served.namespace,
            chunk_tokens=served.chunk_tokens,
            world_size=served.world_size,
        )

    def hashes(self, request_id: str, salt: str, trace: str = "") -> RequestHashes | None:
        # Only `usable` guarantees that no call waits for a first handshake.
        if self._served is None or not self._client.usable:
            return None
        try:
            hasher = self._client.hasher
        except KVFrameworkError:
            return None
        return RequestHashes(hasher, self._served.chunk_tokens, request_id=request_id, cache_salt=salt, trace=trace)

    def lookup(self, request: RequestHashes, start: int, end: int) -> LookupResult:
        return self._serving().lookup(request, start, end)

    def too_short(self, request: RequestHashes) -> None:
        self._serving().too_short(request)

    def poll(self, result: LookupResult) -> LookupResult:
        return self._serving().poll(result)

    def free(self, result: LookupResult) -> None:
        self._serving().free(result)

    def _serving(self) -> SchedulerAdapter:
        assert self._adapter is not None, "lookups come after serve()"
        return self._adapter
