"""What an operator asks of a server: REPORT_STATUS, DUMP and HAND_OVER, the last two for the server's own user alone:
a process of that user on this node, and none of `admit_uids`.

The documents are built in worker threads, so a dump also shows what the serving thread and the storage threads do at
that moment. The fields of the status document are listed in docs/status.md. HAND_OVER gives L1 to a next server of this
node, and this one ends: `kvframework.cli.serving` is the other side.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timezone

import msgspec

import kvframework
from kvframework.api.installing import missing_kernels
from kvframework.api.requests import ClientInfo, Handler
from kvframework.errors import RequestError
from kvframework.logs.form import log_status, recent_lines
from kvframework.masking import Redaction
from kvframework.service.contexts import Contexts, check_own_user
from kvframework.service.finished import FinishedRequests
from kvframework.service.health import problems
from kvframework.service.listeners import EVENTS, Listeners
from kvframework.service.records import MAX_TEXT
from kvframework.storage.manager import StorageManager
from kvframework.wire import messages as m
from kvframework.wire.protocol import REQUESTS

log = logging.getLogger(__name__)


Makers = Mapping[str, Callable[[], object]]


class StatusReport:
    """Builds the document. `server` holds the constant facts; `counted` makes the parts, by name, whose counters of
    failures the log reports as they grow, beside those of the storage, the log and the listeners; `shown` the others.
    """

    def __init__(
        self,
        contexts: Contexts,
        storage: StorageManager,
        listeners: Listeners,
        *,
        chunk_size: int,
        server: Mapping[str, object],
        shown: Makers,
        counted: Makers,
    ) -> None:
        self._contexts = contexts
        self._storage = storage
        self._listeners = listeners
        self._chunk_size = chunk_size
        self._server = server
        self._shown = shown
        self._counted = counted
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
            **{name: make() for name, make in self._shown.items()},
            **self.parts(),
        }
        return {**document, "problems": problems(document)}

    def parts(self) -> dict[str, object]:
        return {
            **self._storage.status(),
            **{name: make() for name, make in self._counted.items()},
            "log": log_status(),
            "events": self._listeners.status(EVENTS),
            "listeners": self._listeners.others(),
        }


class Diagnosis:
    """`parts` make the document's parts beside the log, the threads and the finished requests, by name; `secrets` and
    `models` are hidden in all of them, and so are the models that the requests name."""

    def __init__(
        self,
        parts: Makers,
        finished: FinishedRequests,
        *,
        secrets: Callable[[], Collection[str]],
        models: Callable[[], Collection[str]],
    ) -> None:
        self._parts = {**parts, "log": recent_lines, "threads": stacks}
        self._finished = finished
        self._secrets = secrets
        self._models = models

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [Handler(REQUESTS["DUMP"], self._dump, pooled=True)]

    def _dump(self, client: ClientInfo, _payload: m.Empty, _buffers: Sequence[memoryview]) -> m.DumpReply:
        check_own_user(client, "make a dump")
        records = self._finished.after(0).records
        models = {*self._models(), *(model for record in records for model in (record.model, record.by))}
        redaction = Redaction(self._secrets(), {*models, *(model[:MAX_TEXT] for model in models)})
        document = {name: make() for name, make in self._parts.items()} | {"requests": _anonymous(records)}
        return m.DumpReply(msgspec.json.encode(redaction.document(msgspec.to_builtins(document, enc_hook=_plain))))


def _anonymous(records: Sequence[m.Finished]) -> list[dict[str, object]]:
    """Return the records with numbers in the place of request ids, which an engine's clients may choose."""
    numbers: dict[str, int] = {}
    return [
        msgspec.structs.asdict(record)
        | {"request_id": f"request {numbers.setdefault(record.request_id, len(numbers) + 1)}", "trace": ""}
        for record in records
    ]


def _plain(value: object) -> object:
    return int(value) if isinstance(value, int) else str(value)


def stacks() -> dict[str, str]:
    """Return the stack of each thread by its name, without values."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    return {
        f"{names.get(ident, 'a thread that Python did not start')} ({number})": "".join(traceback.format_stack(frame))
        for number, (ident, frame) in enumerate(frames.items())
    }


_SEND_S = 2.0


class HandOver:
    """`descriptors()` returns the arena and the journal, borrowed; `stop()` begins the end of this server. `done`: a
    next server has them."""

    done = False

    def __init__(self, descriptors: Callable[[], Sequence[int]], stop: Callable[[], None]) -> None:
        self._descriptors = descriptors
        self._stop = stop

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [Handler(REQUESTS["HAND_OVER"], self._hand_over, pooled=True, ordered=True)]

    def _hand_over(self, client: ClientInfo, payload: m.HandOver, _buffers: object) -> m.Empty:
        check_own_user(client, "take over from this server")
        try:
            descriptors = self._descriptors()
            with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as next_one:
                next_one.settimeout(_SEND_S)
                next_one.connect(payload.path)
                socket.send_fds(next_one, [b"arena, journal"], list(descriptors))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise RequestError(f"L1 cannot be handed over: {reason}", where=os.path.basename(payload.path)) from None
        self.done = True
        log.info("process %d takes over: this server ends", client.pid)
        self._stop()
        return m.Empty()
