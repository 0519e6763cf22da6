"""The ring of finished requests, for RECENT: what each LOOKUP, STORE and RETRIEVE asked for and got, the newest `MOST`.

A record is made for the wire when it is read, and formatted in other processes. What is read has no salt, token, digest
or key. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from kvframework.api.listener import RequestRecord
from kvframework.api.requests import ClientInfo, Handler
from kvframework.errors import RequestError
from kvframework.service.records import MAX_TEXT, RequestLog
from kvframework.wire import messages as m
from kvframework.wire.protocol import REQUESTS

MOST = m.MAX_RECENT


class _Ring:
    """The newest records of a kind with their numbers, and the number of all of them so far."""

    def __init__(self) -> None:
        self.held: deque[tuple[int, RequestRecord]] = deque(maxlen=MOST)
        self.last = 0

    def add(self, number: int, record: RequestRecord) -> None:
        self.last += 1
        self.held.append((number, record))


class FinishedRequests:
    """The ring; it hears the records of `requests`. `boot_id` names the server's start."""

    def __init__(self, boot_id: bytes, requests: RequestLog) -> None:
        self._boot_id = boot_id
        self._started_at = time.time()
        self._requests = requests
        requests.listeners.append(self.heard)
        self._lock = threading.Lock()
        self._all = _Ring()
        # A flood of other requests does not push them out.
        self._traced = _Ring()

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [Handler(REQUESTS["RECENT"], self._recent, pooled=True)]

    def heard(self, record: RequestRecord) -> None:
        with self._lock:
            number = self._all.last + 1
            self._all.add(number, record)
            if record.subject.trace:
                self._traced.add(number, record)

    def after(self, number: int, most: int = MOST, request_id: str = "", *, traced: bool = False) -> m.RecentReply:
        """Return the records with a number above `number`, see `Recent`."""
        self._requests.count()
        with self._lock:
            ring = self._traced if traced else self._all
            last, held = ring.last, list(ring.held)
        oldest = last - len(held)
        held = held[max(number - oldest, 0) :]
        if request_id:
            held = [each for each in held if each[1].subject.request_id == request_id[:MAX_TEXT]]
        records = tuple([_message(*each) for each in held[:most]])
        return m.RecentReply(records, last, max(oldest - number, 0), self._boot_id, self._started_at)

    def _recent(self, client: ClientInfo, payload: m.Recent, _buffers: Sequence[memoryview]) -> m.RecentReply:
        if not client.local:
            raise RequestError(
                "only a client on this node may see finished requests", available="a client on this node, over ipc://"
            )
        return self.after(payload.after, payload.most, payload.request_id, traced=payload.traced)


def _message(number: int, record: RequestRecord) -> m.Finished:
    subject, why = record.subject, record.why
    return m.Finished(
        number=number,
        request=record.request,
        at=record.at,
        monotonic=record.ended,
        seconds=record.ended - subject.began,
        request_id=subject.request_id,
        client=subject.client,
        pid=subject.pid,
        session_id=subject.session_id,
        model=subject.model,
        namespace=subject.namespace.hex(),
        outcome=record.outcome,
        start=subject.start,
        asked_tokens=subject.asked_tokens,
        l1_tokens=record.l1_tokens,
        l2_tokens=record.l2_tokens,
        missing=record.missing,
        chunk_tokens=record.chunk_tokens,
        reason=why.reason,
        detail=why.detail,
        cause_at=0.0 if why.at is None else record.at - (record.ended - why.at),
        idle_s=why.idle_s,
        by=why.by,
        path=subject.path,
        objects=record.objects,
        nbytes=record.nbytes,
        tenant=subject.tenant,
        trace=subject.trace,
        tier_calls=tuple(m.TierCall(*call) for call in record.tier_calls),
        load_s=record.load_s,
        compute_s=record.compute_s,
        added_tokens=record.added_tokens,
    )
