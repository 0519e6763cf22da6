"""The ring of finished requests: what each LOOKUP, STORE and RETRIEVE asked for and got, the newest `MOST` of them.

Appending costs 0.5 us: a record is made when it is read, and formatted in other processes. It holds no salt, token,
digest or key.
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
from kvframework.api.trace import sampled_parent
from kvframework.errors import RequestError
from kvframework.service.accounts.misses import Why
from kvframework.storage.l2.loading import TierCall
from kvframework.wire import messages as m
from kvframework.wire.protocol import REQUESTS

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
    namespace: bytes
    start: int
    asked_tokens: int
    path: str = ""
    tenant: str = ""
    trace: str = ""


def subject_of(client: ClientInfo, key: CacheKey, began: float, path: str = "", tenant: str = "") -> Subject:
    return Subject(
        began,
        client.name,
        client.pid,
        client.session_id,
        key.request_id[:MAX_TEXT],
        key.model_name[:MAX_TEXT],
        key.namespace[:4],
        key.start,
        key.end - key.start,
        path,
        tenant,
        # A client may send any text; W3C wants an invalid one ignored.
        sampled_parent(key.trace) if key.trace else "",
    )


_Ends = tuple[str, int, int, int, int]
# Number, wall clock, clock, and the arguments of `add`.
_Entry = tuple[int, float, float, str, Subject, _Ends, Why, int, int, Sequence[TierCall], tuple[float, float], int]


class _Ring:
    """The newest records of a kind, not made yet, and the number of all of them so far."""

    def __init__(self) -> None:
        self.held: deque[_Entry] = deque(maxlen=MOST)
        self.last = 0

    def add(self, entry: _Entry) -> None:
        self.last += 1
        self.held.append(entry)


def _record(
    number: int,
    at: float,
    now: float,
    request: str,
    subject: Subject,
    ends: _Ends,
    why: Why,
    objects: int,
    nbytes: int,
    tier_calls: Sequence[TierCall],
    prices: tuple[float, float],
    added_tokens: int,
) -> m.Finished:
    outcome, l1_tokens, l2_tokens, missing, chunk_tokens = ends
    return m.Finished(
        number=number,
        request=request,
        at=at,
        monotonic=now,
        seconds=now - subject.began,
        request_id=subject.request_id,
        client=subject.client,
        pid=subject.pid,
        session_id=subject.session_id,
        model=subject.model,
        namespace=subject.namespace.hex(),
        outcome=outcome,
        start=subject.start,
        asked_tokens=subject.asked_tokens,
        l1_tokens=l1_tokens,
        l2_tokens=l2_tokens,
        missing=missing,
        chunk_tokens=chunk_tokens,
        reason=why.reason,
        detail=why.detail,
        cause_at=0.0 if why.at is None else at - (now - why.at),
        idle_s=why.idle_s,
        by=why.by,
        path=subject.path,
        objects=objects,
        nbytes=nbytes,
        tenant=subject.tenant,
        trace=subject.trace,
        tier_calls=tuple(m.TierCall(*call) for call in tier_calls),
        load_s=prices[0],
        compute_s=prices[1],
        added_tokens=added_tokens,
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
        self._all = _Ring()
        # A flood of other requests does not push them out.
        self._traced = _Ring()

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
        tier_calls: Sequence[TierCall] = (),
        prices: tuple[float, float] = (0.0, 0.0),
        added_tokens: int = -1,
    ) -> None:
        """Append a request that ends now. See `Finished` for the fields."""
        at, now = time.time(), self.clock()
        ends = outcome, l1_tokens, l2_tokens, missing, chunk_tokens
        # A copy: the load of a lookup that was given up goes on.
        calls = tuple(tier_calls) if subject.trace else ()
        with self._lock:
            entry = (
                self._all.last + 1,
                at,
                now,
                request,
                subject,
                ends,
                why,
                objects,
                nbytes,
                calls,
                prices,
                added_tokens,
            )
            self._all.add(entry)
            if subject.trace:
                self._traced.add(entry)

    def after(self, number: int, most: int = MOST, request_id: str = "", *, traced: bool = False) -> m.RecentReply:
        """Return the records with a number above `number`, see `Recent`."""
        with self._lock:
            ring = self._traced if traced else self._all
            last, held = ring.last, list(ring.held)
        oldest = last - len(held)
        held = held[max(number - oldest, 0) :]
        if request_id:
            held = [entry for entry in held if entry[4].request_id == request_id[:MAX_TEXT]]
        records = tuple([_record(*entry) for entry in held[:most]])
        return m.RecentReply(records, last, max(oldest - number, 0), self._boot_id, self._started_at)

    def _recent(self, client: ClientInfo, payload: m.Recent, _buffers: Sequence[memoryview]) -> m.RecentReply:
        if not client.local:
            raise RequestError(
                "only a client on this node may see finished requests", available="a client on this node, over ipc://"
            )
        return self.after(payload.after, payload.most, payload.request_id, traced=payload.traced)
