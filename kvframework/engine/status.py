"""Owns the status document: what REPORT_STATUS and `kvframework status --json` show. Built in a worker thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

import kvframework
from kvframework.api import ClientInfo, Handler
from kvframework.engine.contexts import Contexts
from kvframework.storage.manager import StorageManager
from kvframework.wire import messages as m
from kvframework.wire.table import REQUESTS


class StatusReport:
    """`server` is what never changes; `messaging` gives the message server's counters and sessions."""

    def __init__(
        self,
        contexts: Contexts,
        storage: StorageManager,
        *,
        chunk_size: int,
        server: Mapping[str, object],
        messaging: Callable[[], Mapping[str, object]],
        tickets: Callable[[], int],
    ) -> None:
        self._contexts = contexts
        self._storage = storage
        self._chunk_size = chunk_size
        self._server = server
        self._messaging = messaging
        self._tickets = tickets
        self._started = time.monotonic()

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [Handler(REQUESTS["REPORT_STATUS"], self._report, pooled=True)]

    def _report(self, _client: ClientInfo, _payload: m.Empty, _buffers: Sequence[memoryview]) -> m.StatusReply:
        return m.StatusReply(msgspec.json.encode(self.document()))

    def document(self) -> dict[str, object]:
        contexts = sorted(self._contexts.values(), key=lambda context: context.instance_id)
        return {
            "server": {
                "version": kvframework.__version__,
                "uptime_s": round(time.monotonic() - self._started, 1),
                "chunk_size": self._chunk_size,
                **self._server,
            },
            "instances": [context.describe(self._chunk_size) for context in contexts],
            "gpu_instance_ids": [context.instance_id for context in contexts if context.is_gpu],
            "non_gpu_instance_ids": [context.instance_id for context in contexts if not context.is_gpu],
            "namespaces": sorted({context.namespace.hex() for context in contexts}),
            "tickets": self._tickets(),
            **self._storage.status(),
            "messaging": self._messaging(),
        }
