"""What an operator asks of a server: DUMP, DRAIN and HAND_OVER, for the server's own user on this node alone.

The dump is built in a worker thread, so it also shows what the serving thread and the storage threads do meanwhile.
HAND_OVER gives L1 to a next server of this node, and this one ends: `kvframework.cli.serving` is the other side."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import repeat
from operator import or_

import msgspec

from kvframework.api.keys import PackedKey
from kvframework.api.plugin import ByteSize
from kvframework.api.requests import ClientInfo, Handler
from kvframework.errors import RequestError
from kvframework.logs.process_log import recent_lines
from kvframework.masking import Redaction
from kvframework.service.contexts import check_own_user
from kvframework.service.recent_requests import FinishedRequests
from kvframework.service.records import MAX_TEXT
from kvframework.status import Drain as DrainStatus
from kvframework.storage.manager import StorageManager
from kvframework.text import one_line, plain
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


# Between two looks at the queues; how long an answer waits for the end, and the end for the last answers.
_STEP_S, _ANSWER_S, _LAST_S = 0.05, 0.5, 0.1


class Drain:
    """Writes to the tiers what only L1 holds, the most recently used objects first, until all is written or a time has
    come, and then calls `stop`: for DRAIN, for a signal, and, `idle`, for want of engines, when STOREs go on. `tick` is
    called again and again. `by_itself`: no signal asked for the end. All but `tick` from any thread."""

    def __init__(self, storage: StorageManager, stop: Callable[[], None]) -> None:
        self._storage, self.stop = storage, stop
        self._writers = [writer for writer in storage.tiers.writers if not writer.store.read_only]
        self._until, self.idle, self.by_itself = math.inf, False, False
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._sizes: dict[PackedKey, int] = {}
        self._total = 0

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [Handler(REQUESTS["DRAIN"], self._drain, pooled=True)]

    @property
    def running(self) -> bool:
        return self._until < math.inf

    def begin(self, within_s: float, *, idle: bool = False) -> None:
        """Drain within so many seconds; one that is under way gets no more time. Also from a signal's handler."""
        self.idle = idle and (self.idle or not self.running)
        self._storage.table.closed = not self.idle
        self._until = min(self._until, time.monotonic() + within_s)

    def cancel(self) -> None:
        """Go on without a drain: an engine has come, or a next server has L1."""
        self._until, self.idle, self.by_itself, self._thread = math.inf, False, False, None
        self._done.clear()
        self._storage.table.closed = False
        for writer in self._writers:
            writer.order_rest(None)

    def tick(self) -> None:
        if self.running and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvf-drain", daemon=True)
            self._thread.start()

    def status(self) -> DrainStatus:
        if not self.running:
            return DrainStatus()
        lacking = [(writer.store, writer.left()) for writer in self._writers]
        # Without a tier that is all of L1.
        left = reduce(or_, (keys for _, keys in lacking)) if lacking else self._sizes.keys()
        why = "{}: {} left, last error: {}".format
        return DrainStatus(
            done=self._done.is_set(),
            left_s=round(max(self._until - time.monotonic(), 0.0), 1),
            written=max(self._total - len(left), 0),
            left=len(left),
            left_bytes=sum(map(self._sizes.get, left, repeat(0))),
            tiers=tuple(one_line(why(of.name, len(keys), of.last_error or "none")) for of, keys in lacking if keys),
        )

    def _drain(self, client: ClientInfo, payload: m.Drain, _buffers: object) -> m.StatusReply:
        check_own_user(client, "drain this server")
        self.by_itself = True
        self.begin(payload.within_s)
        self._done.wait(_ANSWER_S)
        return m.StatusReply(msgspec.json.encode(self.status()))

    def _run(self) -> None:
        me = threading.current_thread()  # another one, or none, once this drain is cancelled
        objects = sorted(self._storage.table.objects(), key=lambda stored: stored.used, reverse=True)
        self._sizes = {stored.key: stored.length for stored in objects}
        for writer in self._writers:
            writer.order_rest(self._sizes)
        self._total = self.status().left
        while self._thread is me and sum(of.write_rest() for of in self._writers) and time.monotonic() < self._until:
            time.sleep(_STEP_S)
        if self._thread is me:
            self._done.set()
            end = self.status()
            what = "; ".join(("drained: %d objects are written, %d (%s) are left", *("%s" for _ in end.tiers)))
            level = logging.WARNING if end.left else logging.INFO
            log.log(level, what, end.written, end.left, ByteSize(end.left_bytes), *end.tiers)
            time.sleep(_LAST_S)
            if self._thread is me:
                self.stop()


_SEND_S = 5.0


@dataclass(eq=False)
class HandOver:
    """`descriptors()` lends arena and journal; `drain` knows how to stop; `since`: when this server's keeper began.
    `done`: a next server has them."""

    descriptors: Callable[[], Sequence[int]]
    drain: Drain
    since: float = 0.0
    done: bool = False

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [Handler(REQUESTS["HAND_OVER"], self._hand_over, pooled=True, ordered=True)]

    def _hand_over(self, client: ClientInfo, payload: m.HandOver, _buffers: object) -> m.Empty:
        check_own_user(client, "take over from this server")
        if payload.since < self.since:
            raise RequestError("another `kvframework hold` keeps this server", hint="use that keeper")
        try:
            descriptors = self.descriptors()
            with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as next_one:
                next_one.settimeout(_SEND_S)
                next_one.connect(payload.path)
                socket.send_fds(next_one, [b"arena, journal"], list(descriptors))
                if payload.confirms and not next_one.recv(1):
                    raise ValueError("the server that asked has ended, or refuses the memory")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise RequestError(f"L1 cannot be handed over: {reason}", where=os.path.basename(payload.path)) from None
        self.done = True
        log.info("this server ends, because process %d takes over", client.pid)
        self.drain.cancel()
        self.drain.stop()
        return m.Empty()
