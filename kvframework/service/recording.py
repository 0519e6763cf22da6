"""TRACE: the LOOKUPs of a running server, for `kvframework trace record`. Without a reader nothing is kept.

A LOOKUP costs the serving thread 1 us more while there is one. What is kept names content by digests; the command
hashes them again, with a salt of its own, before it writes anything. A reader that is silent for `READER_S` is
forgotten, and with the last one the ring. Thread-safe.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvframework.api.keys import NAMESPACE_BYTES, SALT_BYTES, CacheKey
from kvframework.api.requests import ClientInfo, Handler
from kvframework.errors import RequestError
from kvframework.service.contexts import check_own_user
from kvframework.service.keys import KeyGrid
from kvframework.wire import messages as m
from kvframework.wire.protocol import REQUESTS

log = logging.getLogger(__name__)

# TRACE: the LOOKUPs of a running server, for `kvframework trace record`. Without a reader nothing is kept.
#
# A LOOKUP costs the serving thread 1 us more while there is one. What is kept names content by digests; the command
# hashes them again, with a salt of its own, before it writes anything. A reader that is silent for `READER_S` is
# forgotten, and with the last one the ring. Thread-safe.

READER_S = 30.0
# A lookup that waits for L2 is handed over once its hit is known, or after so long without.
UNDECIDED_S = 10.0
# Of a prompt: 33 million tokens in chunks of 256. A longer one is counted only.
MAX_DIGEST_BYTES = 4 << 20
MAX_REPLY_BYTES = 4 << 20
# Of an entry without its digests, about.
_ENTRY_BYTES = 512


class Recorded:
    """A LOOKUP in the ring. `hit_tokens` is -1 until it is known."""

    __slots__ = ("began", "chunk_tokens", "digests", "end", "hit_tokens", "model", "number", "scope", "start", "tenant")

    def __init__(self, number: int, began: float, key: CacheKey, grid: KeyGrid, digests: bytes, tenant: int) -> None:
        self.number = number
        self.began = began
        self.model = key.model_name
        self.start = key.start
        self.end = key.end
        self.digests = digests
        self.scope = grid.prefixes[0][: NAMESPACE_BYTES + SALT_BYTES]
        self.chunk_tokens = grid.desc.chunk_tokens
        self.tenant = tenant
        self.hit_tokens = -1

    @property
    def nbytes(self) -> int:
        return _ENTRY_BYTES + len(self.digests)


class Recording:
    """The ring, `most_bytes` of it at most, and its readers. `on` while there is one."""

    def __init__(self, clock: Callable[[], float], most_bytes: int) -> None:
        self.on = False
        # All LOOKUPs so far, counted by the one thread that also calls `add`, whether it is on or not: so a reader that
        # was forgotten and comes back sees how many it lacks.
        self.count = 0
        self._clock = clock
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._ring: deque[Recorded] = deque()
        self._bytes = 0
        # The last number, of a LOOKUP or of one that could not be kept.
        self._last = 0
        # By session: until when it may be silent, and the last number that it has.
        self._readers: dict[int, tuple[float, int]] = {}

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [Handler(REQUESTS["TRACE"], self._trace, pooled=True)]

    def add(self, key: CacheKey, grid: KeyGrid | None, began: float, tenant: int) -> Recorded | None:
        """Keep a LOOKUP that has been asked and counted, while `on`; the caller sets its `hit_tokens` later. Returns
        None for one whose chunks are not known."""
        digests = key.digests
        if not digests and grid is not None and not key.start:
            digests = b"".join(grid.digests)
        with self._lock:
            if not self.on:
                return None
            self._last = self.count
            if grid is None or not 0 < len(digests) <= MAX_DIGEST_BYTES:
                return None
            entry = Recorded(self._last, began, key, grid, digests, tenant)
            self._ring.append(entry)
            self._bytes += entry.nbytes
            while self._bytes > self._most_bytes:
                self._forget_oldest()
        return entry

    def configure(self, *, most_bytes: int) -> None:
        """Change the size of the ring, from the next LOOKUP on."""
        self._most_bytes = most_bytes

    def expire(self) -> None:
        """Forget readers that have been silent for too long. Called about every 100 ms."""
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
            raise RequestError(
                "this server records no traces: [server] trace_memory is 0",
                available="a size, such as 32MiB",
                hint="set it in the TOML, then: kvframework config apply",
            )
        now = self._clock()
        with self._lock:
            if not self.on:
                self._last = self.count
            after = self._last if payload.after < 0 else min(payload.after, self._last)
            if not self.on:
                log.info("a trace of the lookups is recorded, for %s (process %d)", client.name, client.pid)
            self.on = True
            self._readers[client.session_id] = now + READER_S, after
            acknowledged = min(number for _, number in self._readers.values())
            while self._ring and self._ring[0].number <= acknowledged:
                self._forget_oldest()
            handed, last, more = self._after(after, now if payload.done else now - UNDECIDED_S)
            if payload.done and not more:
                self._end(client.session_id)
        return m.TraceReply(tuple(_message(each) for each in handed), last, more)

    def _after(self, after: int, undecided_since: float) -> tuple[list[Recorded], int, bool]:
        """Return the entries behind a number, the number up to which that is everything, and whether there is more."""
        handed: list[Recorded] = []
        nbytes = 0
        for entry in self._ring:
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
        self._bytes -= self._ring.popleft().nbytes

    def _end(self, session_id: int) -> None:
        if self._readers.pop(session_id, None) is None or self._readers:
            return
        self.on = False
        self._ring.clear()
        self._bytes = 0
        log.info("the recording of a trace has ended")


def _message(entry: Recorded) -> m.TracedLookup:
    return m.TracedLookup(
        number=entry.number,
        began=entry.began,
        model=entry.model,
        tenant=entry.tenant,
        start=entry.start,
        end=entry.end,
        hit_tokens=entry.hit_tokens,
        chunk_tokens=entry.chunk_tokens,
        scope=entry.scope,
        digests=entry.digests,
    )
