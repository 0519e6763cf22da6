"""What happened at a server within the last minute, out of its status documents. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvf_observe.poller import Document

SPAN_S = 60.0
# Documents that are kept lie as far apart, however often the server is asked.
APART_S = 1.0

_NOTHING: Document = {}


def reach(node: Any, *path: str | int) -> Any:
    """The value at a path of keys and places; 0 where a server of another release has none."""
    for key in path:
        if isinstance(node, Mapping):
            node = node.get(str(key))
        else:
            node = node[key] if isinstance(node, list) and isinstance(key, int) and key < len(node) else None
    return 0 if node is None else node


class Window(NamedTuple):
    """The newest document, one of the same server from `seconds` before, and whether that is the server's start. Of a
    window of 0 seconds no rate is known."""

    now: Document
    before: Document
    seconds: float

    def rate(self, grown: float) -> float | None:
        """An amount of the window by the second."""
        return grown / self.seconds if self.seconds > 0 else None

    def grown(self, *path: str | int) -> float:
        """By how much a counter grew."""
        return float(max(reach(self.now, *path) - reach(self.before, *path), 0))


class Minute:
    """A ring of documents of one start of a server, a minute long."""

    def __init__(self) -> None:
        self._boot: object = None
        self._ring: deque[tuple[float, Document]] = deque()

    def add(self, document: Document, at: float) -> Window:
        """Take a document of the time `at`, which never goes back, and return what is known now.

        The documents of another start are forgotten. All counters of a server that is younger than the window began at
        0 with it."""
        boot = (reach(document, "server", "boot_id"), reach(document, "server", "pid"))
        if boot != self._boot:
            self._boot = boot
            self._ring.clear()
            uptime = reach(document, "server", "uptime_s")
            if 0 < uptime <= SPAN_S:
                self._ring.append((at - uptime, _NOTHING))
        if not self._ring or at - self._ring[-1][0] >= APART_S:
            self._ring.append((at, document))
        while len(self._ring) > 1 and self._ring[1][0] <= at - SPAN_S:
            self._ring.popleft()
        began, before = self._ring[0]
        return Window(document, before, max(at - began, 0.0))
