"""The ring of finished requests: what each LOOKUP, STORE and RETRIEVE asked for and got, the newest `MOST` of them.

Appending costs 1 us; its readers format it, in other processes. A record holds no salt, token, digest or key.
Thread-safe: copies end in threads of their own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvframework.api.keys import CacheKey
from kvframework.api.requests import ClientInfo, Handler
from kvframework.errors import RequestError
from kvframework.service.accounts.misses import Why
from kvframework.wire import messages as m
from kvframework.wire.table import REQUESTS

MOST = m.MAX_RECENT
# Of a text that a client chose.
MAX_TEXT = 128
NOT_MISSED = Why("")


class Subject(NamedTuple):
    """Which request it is, without its content. `began` is the time of its first message, of the monotonic clock;
    `path` is how the bytes of a transfer move."""

    began: float
    client: str
    pid: int
    session_id: int
    request_id: str
    model: str
    namespace: str
    start: int
    asked_tokens: int
    path: str = ""
    tenant: str = ""


def subject_of(client: ClientInfo, key: CacheKey, began: float, path: str = "", tenant: str = "") -> Subject:
    return Subject(
        began,
        client.name,
        client.pid,
        client.session_id,
        key.request_id[:MAX_TEXT],
        key.model_name[:MAX_TEXT],
        key.namespace[:4].hex(),
        key.start,
        key.end - key.start,
        path,
        tenant,
    )


class FinishedRequests:
    """The ring. `boot_id` names the server's start; `clock` is monotonic; `tenant_of` names the tenant of a salt."""

    def __init__(
        self,
        boot_id: bytes,
        clock: Callable[[], float] = time.monotonic,
        tenant_of: Callable[[str], str] = lambda _salt: "",
    ) -> None:
        self._boot_id = boot_id
        self._started_at = time.time()
        self.clock = clock
        self.tenant_of = tenant_of
        self._lock = threading.Lock()
        self._ring: deque[m.Finished] = deque(maxlen=MOST)
        self._last = 0

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [Handler(REQUESTS["RECENT"], self._recent, pooled=True)]

    def add(
        self,
        request: str,
        subject: Subject,
        outcome: str,
        *,
        l1_tokens: int = 0,
        l2_tokens: int = 0,
        missing: int = -1,
        chunk_tokens: int = 0,
        why: Why = NOT_MISSED,
        objects: int = 0,
        nbytes: int = 0,
        trace: str = "",
    ) -> None:
        """Append a request that ends now. See `Finished` for the fields."""
        wall, now = time.time(), self.clock()
        (began, client, pid, session_id, request_id, model, namespace, start, asked_tokens, path, tenant) = subject
        reason, detail, cause_at, idle_s, by = why
        with self._lock:
            self._last += 1
            self._ring.append(
                m.Finished(
                    self._last,
                    request,
                    wall,
                    now,
                    now - began,
                    request_id,
                    client,
                    pid,
                    session_id,
                    model,
                    namespace,
                    outcome,
                    start,
                    asked_tokens,
                    l1_tokens,
                    l2_tokens,
                    missing,
                    chunk_tokens,
                    reason,
                    detail,
                    0.0 if cause_at is None else wall - (now - cause_at),
                    idle_s,
                    by,
                    path,
                    objects,
                    nbytes,
                    tenant=tenant,
                    trace=trace,
                )
            )

    def after(self, number: int, most: int = MOST, request_id: str = "") -> m.RecentReply:
        """Return the records with a number above `number`, see `Recent`."""
        with self._lock:
            last, held = self._last, list(self._ring)
        oldest = last - len(held)
        held = held[max(number - oldest, 0) :]
        if request_id:
            held = [record for record in held if record.request_id == request_id[:MAX_TEXT]]
        return m.RecentReply(tuple(held[:most]), last, max(oldest - number, 0), self._boot_id, self._started_at)

    def _recent(self, client: ClientInfo, payload: m.Recent, _buffers: Sequence[memoryview]) -> m.RecentReply:
        if not client.local:
            raise RequestError(
                "only a client on this node may see finished requests", available="a client on this node, over ipc://"
            )
        return self.after(payload.after, payload.most, payload.request_id)
