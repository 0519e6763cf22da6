"""The finished requests that other processes read, from two bounded rings.

RECENT, for `kvframework explain`, has what each LOOKUP, STORE and RETRIEVE asked for and got, and no salt, token,
digest or key. TRACE, for `kvframework trace record`, has the LOOKUPs of a running server.

A trace names content by digests; the command hashes them again, with a salt of its own, before it writes anything.
Without a reader nothing of it is kept; with one a LOOKUP costs the serving thread 1 us more. Thread-safe."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

import msgspec

from kvframework.api.keys import NAMESPACE_BYTES, SALT_BYTES, CacheKey
from kvframework.api.listener import RequestRecord
from kvframework.api.requests import ClientInfo, Handler
from kvframework.errors import RequestError
from kvframework.service.contexts import check_own_user
from kvframework.service.keys import KeyGrid
from kvframework.service.records import MAX_TEXT, RequestLog
from kvframework.wire import messages as m
from kvframework.wire.protocol import REQUESTS

log = logging.getLogger(__name__)

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
            if record.trace:
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
            held = [each for each in held if each[1].request_id == request_id[:MAX_TEXT]]
        records = tuple([_message(*each) for each in held[:most]])
        return m.RecentReply(records, last, max(oldest - number, 0), self._boot_id, self._started_at)

    def _recent(self, client: ClientInfo, payload: m.Recent, _buffers: Sequence[memoryview]) -> m.RecentReply:
        if not client.local:
            raise RequestError(
                "only a client on this node may see finished requests", available="a client on this node, over ipc://"
            )
        return self.after(payload.after, payload.most, payload.request_id, traced=payload.traced)


def _message(number: int, record: RequestRecord) -> m.Finished:
    """Return it for the wire: without what is for listeners alone."""
    return m.Finished(number, *[getattr(record, name) for name in m.Finished.__struct_fields__[1:]])


# Once the reader of a trace is silent for so long it is forgotten, and the ring.
READER_S = 30.0
# A lookup that waits for L2 is handed over once its hit is known, or after so long without.
UNDECIDED_S = 10.0
# Of a prompt: 33 million tokens in chunks of 256. A longer one is counted only.
MAX_DIGEST_BYTES = 4 << 20
MAX_REPLY_BYTES = 4 << 20
# Of an entry without its digests, about.
_ENTRY_BYTES = 512


class Recording:
    """The ring, `most_bytes` of it at most, and its readers. `on` while there is one."""

    def __init__(self, clock: Callable[[], float], most_bytes: int) -> None:
        self.on = False
        # All LOOKUPs so far, also while it is off: a reader that was forgotten and comes back sees how many it lacks.
        self.count = 0
        self._clock = clock
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._ring: OrderedDict[int, m.TracedLookup] = OrderedDict()
        self._bytes = 0
        # The last number, of a LOOKUP or of one that could not be kept.
        self._last = 0
        # By session: until when it may be silent, and the last number that it has.
        self._readers: dict[int, tuple[float, int]] = {}

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [Handler(REQUESTS["TRACE"], self._trace, pooled=True)]

    def add(self, key: CacheKey, grid: KeyGrid | None, began: float, tenant: int) -> int:
        """Keep a counted LOOKUP, while `on`, until it is `decided`; return its number, 0 for one of unknown chunks."""
        digests = key.digests
        if not digests and grid is not None and not key.start:
            digests = b"".join(grid.digests)
        with self._lock:
            if not self.on:
                return 0
            self._last = self.count
            if grid is None or not 0 < len(digests) <= MAX_DIGEST_BYTES:
                return 0
            self._ring[self._last] = m.TracedLookup(
                number=self._last,
                began=began,
                model=key.model_name,
                tenant=tenant,
                start=key.start,
                end=key.end,
                hit_tokens=-1,
                chunk_tokens=grid.desc.chunk_tokens,
                scope=grid.prefixes[0][: NAMESPACE_BYTES + SALT_BYTES],
                digests=digests,
            )
            self._bytes += _ENTRY_BYTES + len(digests)
            while self._bytes > self._most_bytes:
                self._forget_oldest()
            return self._last

    def decided(self, number: int, hit_tokens: int) -> None:
        with self._lock:
            entry = self._ring.get(number)
            if entry is not None:
                self._ring[number] = msgspec.structs.replace(entry, hit_tokens=hit_tokens)

    def configure(self, *, most_bytes: int) -> None:
        self._most_bytes = most_bytes

    def expire(self) -> None:
        if not self.on:
            return
        now = self._clock()
        with self._lock:
            for session_id in [each for each, (until, _) in self._readers.items() if until < now]:
                self._end(session_id)

    def end_session(self, session_id: int) -> None:
        with self._lock:
            self._end(session_id)

    def _trace(self, client: ClientInfo, payload: m.Trace, _buffers: Sequence[memoryview]) -> m.TraceReply:
        check_own_user(client, "record a trace")
        if not self._most_bytes:
            fact, available = (
                "the server records no traces, because [server] trace_memory is 0",
                "a size, such as 32MiB",
            )
            raise RequestError(fact, available=available, hint="set the key, then: kvframework config apply")
        now = self._clock()
        with self._lock:
            if not self.on:
                self._last = self.count
            after = self._last if payload.after < 0 else min(payload.after, self._last)
            if not self.on:
                log.info("recording a trace of lookups for %s (process %d)", client.name, client.pid)
            self.on = True
            self._readers[client.session_id] = now + READER_S, after
            acknowledged = min(number for _, number in self._readers.values())
            while self._ring and next(iter(self._ring)) <= acknowledged:
                self._forget_oldest()
            handed, last, more = self._after(after, now if payload.done else now - UNDECIDED_S)
            if payload.done and not more:
                self._end(client.session_id)
        return m.TraceReply(tuple(handed), last, more)

    def _after(self, after: int, undecided_since: float) -> tuple[list[m.TracedLookup], int, bool]:
        """Return the entries behind a number, the number up to which that is everything, and whether there is more."""
        handed: list[m.TracedLookup] = []
        nbytes = 0
        for entry in self._ring.values():
            if entry.number <= after:
                continue
            if entry.hit_tokens < 0 and entry.began > undecided_since:
                return handed, entry.number - 1, False
            if len(handed) == m.MAX_TRACED or nbytes > MAX_REPLY_BYTES:
                return handed, entry.number - 1, True
            handed.append(entry)
            nbytes += len(entry.digests)
        return handed, self._last, False

    def _forget_oldest(self) -> None:
        self._bytes -= _ENTRY_BYTES + len(self._ring.popitem(last=False)[1].digests)

    def _end(self, session_id: int) -> None:
        if self._readers.pop(session_id, None) is None or self._readers:
            return
        self.on = False
        self._ring.clear()
        self._bytes = 0
        log.info("recording the trace has ended")
