"""DUMP: what only the server knows for a bug report, without secrets. Built in a worker thread, so it also shows what
the serving thread and the storage threads do at that moment."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from kvframework.api.requests import ClientInfo, Handler
from kvframework.logs.form import recent_lines
from kvframework.masking import Redaction
from kvframework.service.accounts.finished import MAX_TEXT, FinishedRequests
from kvframework.service.own_user import check_own_user
from kvframework.wire import messages as m
from kvframework.wire.table import REQUESTS


class Diagnosis:
    """`parts` make the document's parts beside the log, the threads and the finished requests, by name; `secrets` and
    `models` are hidden in all of them, and so are the models that the requests name."""

    def __init__(
        self,
        parts: Mapping[str, Callable[[], object]],
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
