"""The status document of REPORT_STATUS and `kvframework status --json`. Built in a worker thread; its fields are listed
in docs/status.md."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone

import msgspec

import kvframework
from kvframework.api.requests import ClientInfo, Handler
from kvframework.api.server_transport import ServerTransport
from kvframework.kernels import missing_kernels
from kvframework.logs.form import log_status
from kvframework.service.contexts import Contexts
from kvframework.service.health import problems
from kvframework.storage.manager import StorageManager
from kvframework.wire import messages as m
from kvframework.wire.protocol import REQUESTS


class StatusReport:
    """Builds the document. `server` holds the constant facts; `messaging` gives the message server's counters and
    sessions, `requests` the durations of its answers; `transports` are the server halves by name, None for an
    engine-driven one."""

    def __init__(
        self,
        contexts: Contexts,
        storage: StorageManager,
        *,
        chunk_size: int,
        server: Mapping[str, object],
        transports: Mapping[str, ServerTransport | None],
        messaging: Callable[[], Mapping[str, object]],
        observe: Callable[[], Mapping[str, object]],
        requests: Callable[[], Mapping[str, object]],
        tickets: Callable[[], int],
        lookups: Callable[[], Mapping[str, object]],
        price: Callable[[], Mapping[str, object]],
        losses: Callable[[], Mapping[str, object]],
        use: Callable[[], Mapping[str, object]],
        events: Callable[[], Mapping[str, object]],
    ) -> None:
        self._contexts = contexts
        self._storage = storage
        self._chunk_size = chunk_size
        self._server = server
        self._transports = transports
        self._messaging = messaging
        self._observe = observe
        self._requests = requests
        self._tickets = tickets
        self._lookups = lookups
        self._price = price
        self._losses = losses
        self._use = use
        self._events = events
        self._started = time.monotonic()
        self._started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [Handler(REQUESTS["REPORT_STATUS"], self._report, pooled=True, ordered=True)]

    def _report(self, _client: ClientInfo, _payload: m.Empty, _buffers: Sequence[memoryview]) -> m.StatusReply:
        return m.StatusReply(msgspec.json.encode(self.document()))

    def document(self) -> dict[str, object]:
        # `list` in one step: the serving thread may change the registry meanwhile.
        contexts = sorted(list(self._contexts.values()), key=lambda context: context.instance_id)  # noqa: C414
        document: dict[str, object] = {
            "server": {
                "version": kvframework.__version__,
                "started_at": self._started_at,
                "uptime_s": round(time.monotonic() - self._started, 1),
                "chunk_size": self._chunk_size,
                "missing_kernels": list(missing_kernels()),
                **self._server,
            },
            "instances": [context.describe(self._chunk_size) for context in contexts],
            "gpu_instance_ids": [context.instance_id for context in contexts if context.is_gpu],
            "non_gpu_instance_ids": [context.instance_id for context in contexts if not context.is_gpu],
            "namespaces": sorted({context.namespace.hex() for context in contexts}),
            "tickets": self._tickets(),
            "lookups": self._lookups(),
            "price": self._price(),
            "use": self._use(),
            "requests": self._requests(),
            "transports": {name: half.status() if half else {} for name, half in self._transports.items()},
            **self.parts(),
        }
        return {**document, "problems": problems(document)}

    def parts(self) -> dict[str, object]:
        """Return the clients' losses, and the storage's, the message server's, the log's and the events' part of the
        document."""
        return {
            "losses": self._losses(),
            **self._storage.status(),
            "messaging": self._messaging(),
            "log": log_status(),
            "observe": self._observe(),
            "events": self._events(),
        }
