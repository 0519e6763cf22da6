"""The listeners of a server: what they are offered, and a thread for each."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from kvframework.api.hasher import KeyHasher
from kvframework.api.keys import PackedKey
from kvframework.api.listener import ChunkShape, Listener, ListenerContext, ServerTerms
from kvframework.messaging.curve import ServerKeys
from kvframework.messaging.server.sockets import ListenerDoors, ListenerSockets
from kvframework.record_ring import RecordRing, RingReader
from kvframework.wire.protocol import SALTED_TOKEN_IDS, TOKEN_IDS

log = logging.getLogger(__name__)

# Time from the end of the records to the end of the listeners.
STOP_S = 2.0
# The listener with its own table and its own part of the status document.
EVENTS = "events"
_FEATURES = {"none": (), "plain": (TOKEN_IDS,), "salted": (TOKEN_IDS, SALTED_TOKEN_IDS)}


@dataclass(eq=False)
class ServerContext(ListenerContext):
    """What this server offers to one listener; `shape_of` and `which_present` are those of its service and storage."""

    where: str
    server: ServerTerms
    hasher: KeyHasher
    which_present: Callable[[Sequence[PackedKey]], Sequence[bool]]
    shape_of: Callable[[bytes, str], ChunkShape | None]
    doors: ListenerDoors
    keys: ServerKeys | None = None
    admit_uids: Collection[int] = ()

    def present(self, keys: Sequence[PackedKey]) -> Sequence[bool]:
        return self.which_present(keys)

    def shape(self, namespace: bytes, cache_salt: str) -> ChunkShape | None:
        return self.shape_of(namespace, cache_salt)

    def sockets(self, *, insecure: bool = False) -> ListenerSockets:
        return ListenerSockets(self.doors, None if insecure else self.keys, self.admit_uids)


class _Running:
    """A listener, its place in the ring, and its thread from `start` on."""

    def __init__(self, name: str, listener: Listener, reader: RingReader) -> None:
        self.name = name
        self.listener = listener
        self.reader = reader
        self.problem = ""
        self.thread = threading.Thread(target=self._run, name=f"kvf-{name}"[:15], daemon=True)

    def _run(self) -> None:
        try:
            self.listener.listen(self.reader)
            if not self.reader.ended:
                self.problem = "the listener has ended"
        except Exception as error:
            self.problem = f"the listener failed: {error!r}"
            log.exception("the listener %s failed and gets no more records", self.name)
        finally:
            self.reader.close()


class Listeners:
    """All listeners of a server; they read `ring`. `doors` are those of their sockets."""

    def __init__(self, ring: RecordRing) -> None:
        self.ring = ring
        self.doors = ListenerDoors()
        self._running: list[_Running] = []
        self.block_tokens = 1

    def add(self, name: str, listener: Listener) -> None:
        self._running.append(_Running(name, listener, self.ring.open()))
        self.ring.wants_contents |= listener.wants != "none"
        self.block_tokens = math.lcm(self.block_tokens, listener.block_tokens)

    @property
    def features(self) -> tuple[str, ...]:
        """Names for HELLO of the contents that listeners want."""
        wanted = {feature for each in self._running for feature in _FEATURES[each.listener.wants]}
        return tuple(sorted(wanted))

    def start(self, *, keeps: bool) -> None:
        """Start all; `keeps`: what L1 holds outlives the server. Blocks as they do. Raises what they raise; those that
        have started then need `stop`."""
        for each in self._running:
            each.listener.start(keeps=keeps)
            each.thread.start()

    def stop(self, *, handed_over: bool) -> None:
        """End the records; `handed_over`: the next server has L1. Waits `STOP_S` seconds at most. Idempotent."""
        for each in self._running:
            each.reader.end(handed_over=handed_over)
        until = time.monotonic() + STOP_S
        for each in self._running:
            if each.thread.ident is not None:
                each.thread.join(max(until - time.monotonic(), 0.0))

    def status(self, name: str) -> dict[str, object]:
        """Return one listener's part of the status document, {} for none of that name. From any thread."""
        return next((_status(each) for each in self._running if each.name == name), {})

    def others(self) -> dict[str, object]:
        """Return the parts of the listeners that have no place of their own in the status document, by name."""
        return {each.name: _status(each) for each in self._running if each.name != EVENTS}


def _status(running: _Running) -> dict[str, object]:
    try:
        status = dict(running.listener.status())
        msgspec.json.encode(status)
    except Exception as error:  # noqa: BLE001  one listener must not hide the rest of the status
        status = {"problem": f"the listener's status failed: {error!r}"}
    return status | {"problem": running.problem} if running.problem else status
