"""The bounds of what a holder lends: its connections, strangers among them, and the bytes on their way. Thread-safe."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvf_peers.messages import ProtocolError
from kvf_peers.wire import Wire
from kvframework.api.process import LogLimit

log = logging.getLogger(__name__)

_STRANGERS, _STRANGERS_OF_A_HOST = 32, 8
# A connection that has asked for nothing for so long makes place for another.
_IDLE_ENOUGH_S = 1.0
_REFUSED_TOLD = 8
_TELL_EVERY_S = 1.0


@dataclass
class Served:
    """A connection from `host`: a stranger's; one that waits for a request since `idle_since`; or one that is
    answered."""

    host: str
    thread: threading.Thread | None = None
    is_stranger: bool = True
    idle_since: float | None = None


class Refused(NamedTuple):
    """A host that was refused: why the last time, how often, when last."""

    reason: str
    times: int
    at: float


class Connections:
    """At most `most`, and strangers, who have not proved themselves yet, besides."""

    def __init__(self, most: int, place: str) -> None:
        self.counts = Counter(full=0, strangers=0)
        self._most = most
        self._place = place
        self._served: dict[Wire, Served] = {}
        self._refused: OrderedDict[str, Refused] = OrderedDict()
        self._limit = LogLimit(1, _TELL_EVERY_S)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._served)

    def all(self) -> dict[Wire, Served]:
        """Returns those of now."""
        with self._lock:
            return dict(self._served)

    def add(self, wire: Wire, stranger: Served) -> bool:
        """Returns whether there is place for one more stranger."""
        with self._lock:
            hosts = [each.host for each in self._served.values() if each.is_stranger]
            if len(hosts) >= _STRANGERS or hosts.count(stranger.host) >= _STRANGERS_OF_A_HOST:
                self.counts["full"] += 1
                return False
            self._served[wire] = stranger
            return True

    def welcome(self, wire: Wire) -> None:
        """A stranger has proved itself. Ends the connection that is idle for longest, if there are too many. Raises
        `ProtocolError` if all of them are used."""
        with self._lock:
            known = {each: served.idle_since for each, served in self._served.items() if not served.is_stranger}
            if len(known) >= self._most:
                idle = {each: since for each, since in known.items() if since is not None}
                oldest = min(idle, key=idle.__getitem__, default=None)
                if oldest is None or idle[oldest] > time.monotonic() - _IDLE_ENOUGH_S:
                    self.counts["full"] += 1
                    raise ProtocolError("all connections are in use")
                del self._served[oldest]
                oldest.cut()
            self._served[wire].is_stranger = False

    def end(self, wire: Wire) -> None:
        """Closes a connection."""
        with self._lock:
            self._served.pop(wire, None)
        wire.close()

    def refuse(self, host: str, reason: str) -> None:
        """Remembers a stranger that was refused; the log has it once for each reason, however often it comes."""
        now = time.monotonic()
        with self._lock:
            self.counts["strangers"] += 1
            before = self._refused.pop(host, None)
            self._refused[host] = Refused(reason, before.times + 1 if before else 1, now)
            if len(self._refused) > _REFUSED_TOLD:
                self._refused.popitem(last=False)
        if (before is None or before.reason != reason) and self._limit.passes("refused"):
            log.warning("%s was refused at %s: %s", host, self._place, reason)

    def refused(self) -> list[dict[str, object]]:
        """Returns the hosts that were refused last, for the status."""
        now = time.monotonic()
        with self._lock:
            return [
                {"node": host, "reason": each.reason, "count": each.times, "ago_s": round(now - each.at, 1)}
                for host, each in reversed(self._refused.items())
            ]


class Room:
    """Bytes on their way, at most `most` of them, or one larger value. Thread-safe."""

    def __init__(self, most: int) -> None:
        self.taken = 0
        self._most = most
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def held(self, nbytes: int, until: float) -> Iterator[bool]:
        """Yields whether there is room, which it waits for; `nbytes` of it are taken meanwhile."""
        size = min(nbytes, self._most)
        with self._changed:
            there = self._changed.wait_for(lambda: self.taken + size <= self._most, max(until - time.monotonic(), 0.0))
            self.taken += size if there else 0
        try:
            yield there
        finally:
            if there:
                with self._changed:
                    self.taken -= size
                    self._changed.notify_all()
