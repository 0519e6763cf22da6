"""What an operator asks of a server: DUMP and HAND_OVER, for the server's own user on this node alone.

The dump is built in a worker thread, so it also shows what the serving thread and the storage threads do meanwhile.
HAND_OVER gives L1 to a next server of this node, and this one ends: `kvframework.cli.serving` is the other side.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvframework.api.requests import ClientInfo, Handler
from kvframework.errors import RequestError
from kvframework.logs.process_log import recent_lines
from kvframework.masking import Redaction
from kvframework.service.contexts import check_own_user
from kvframework.service.recent_requests import FinishedRequests
from kvframework.service.records import MAX_TEXT
from kvframework.text import plain
from kvframework.wire import messages as m
from kvframework.wire.protocol import REQUESTS

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Diagnosis:
    """`parts` make the document's parts beside the log, the threads and the finished requests, by name; `secrets` and
    `models` are hidden in all of them, and so are the models that the requests name."""

    parts: Mapping[str, Callable[[], object]]
    finished: FinishedRequests
    secrets: Callable[[], Collection[str]]
    models: Callable[[], Collection[str]]

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [Handler(REQUESTS["DUMP"], self._dump, pooled=True)]

    def _dump(self, client: ClientInfo, _payload: m.Empty, _buffers: Sequence[memoryview]) -> m.DumpReply:
        check_own_user(client, "make a dump")
        records = self.finished.after(0).records
        models = {*self.models(), *(model for record in records for model in (record.model, record.by))}
        redaction = Redaction(self.secrets(), {*models, *(model[:MAX_TEXT] for model in models)})
        parts = {**self.parts, "log": recent_lines, "threads": stacks}
        document = {name: make() for name, make in parts.items()} | {"requests": _anonymous(records)}
        return m.DumpReply(msgspec.json.encode(redaction.document(msgspec.to_builtins(document, enc_hook=plain))))


def _anonymous(records: Sequence[m.Finished]) -> list[dict[str, object]]:
    """Return the records with numbers in the place of request ids, which an engine's clients may choose."""
    numbers: dict[str, int] = {}
    return [
        msgspec.structs.asdict(record)
        | {"request_id": f"request {numbers.setdefault(record.request_id, len(numbers) + 1)}", "trace": ""}
        for record in records
    ]


def stacks() -> dict[str, str]:
    """Return the stack of each thread by its name, without values."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    return {
        f"{names.get(ident, 'a thread that Python did not start')} ({number})": "".join(traceback.format_stack(frame))
        for number, (ident, frame) in enumerate(frames.items())
    }


_SEND_S = 2.0


@dataclass(eq=False)
class HandOver:
    """`descriptors()` lends arena and journal; `stop()` begins the server's end. `done`: a next server has them."""

    descriptors: Callable[[], Sequence[int]]
    stop: Callable[[], None]
    done: bool = False

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [Handler(REQUESTS["HAND_OVER"], self._hand_over, pooled=True, ordered=True)]

    def _hand_over(self, client: ClientInfo, payload: m.HandOver, _buffers: object) -> m.Empty:
        check_own_user(client, "take over from this server")
        try:
            descriptors = self.descriptors()
            with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as next_one:
                next_one.settimeout(_SEND_S)
                next_one.connect(payload.path)
                socket.send_fds(next_one, [b"arena, journal"], list(descriptors))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise RequestError(f"L1 cannot be handed over: {reason}", where=os.path.basename(payload.path)) from None
        self.done = True
        log.info("process %d takes over: this server ends", client.pid)
        self.stop()
        return m.Empty()
