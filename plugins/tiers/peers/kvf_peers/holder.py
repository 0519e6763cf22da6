"""The holder: lends what L1 has to other nodes that ask, and to no one else.

One thread accepts, one serves each connection, and none is the serving thread. Bounded: connections, those of strangers
who have not proved themselves yet, how fast they come, bytes on their way. What is beyond a bound is refused at once:
the reader then asks another node, or computes; but first a connection ends that has asked for nothing for longest. An
object is pinned while its bytes go out, and never longer than the reader waits.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvf_peers import messages as m
from kvf_peers.settings import Address, Settings
from kvf_peers.wire import NotTrusted, Wire, admit, explain
from kvframework.api.keys import PackedKey
from kvframework.api.process import LogLimit, visible
from kvframework.api.tier import Node
from kvframework.errors import ConfigFieldError

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
        with self._lock:
            return dict(self._served)

    def add(self, wire: Wire, stranger: Served) -> bool:
        """Return whether there is place for one more stranger."""
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
                    raise m.ProtocolError("all connections of this node are in use")
                del self._served[oldest]
                oldest.cut()
            self._served[wire].is_stranger = False

    def end(self, wire: Wire) -> None:
        with self._lock:
            self._served.pop(wire, None)
        wire.close()

    def refuse(self, host: str, reason: str) -> None:
        """Remember a stranger that was refused; the log has it once for each reason, however often it comes."""
        now = time.monotonic()
        with self._lock:
            self.counts["strangers"] += 1
            before = self._refused.pop(host, None)
            self._refused[host] = Refused(reason, before.times + 1 if before else 1, now)
            if len(self._refused) > _REFUSED_TOLD:
                self._refused.popitem(last=False)
        if (before is None or before.reason != reason) and self._limit.passes("refused"):
            log.warning("refused the node %s at %s: %s", host, self._place, reason)

    def refused(self) -> list[dict[str, object]]:
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
        """Yield whether there is room, which it waits for; `nbytes` of it are taken meanwhile."""
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


# For TLS and the proofs; for one more request; for an answer without a value.
_HELLO_S, _IDLE_S, _ANSWER_S = 2.0, 120.0, 5.0
# Longest time that an object is pinned for one reader, whatever that says.
_MOST_S = 30.0
# For what is on its way to other readers.
_WAIT_S = 0.25
_AGAIN_S = 1.0
_JOIN_S = 0.5
_BACKLOG = 64
# From one connection to the next: a crowd of strangers waits in the system's queue, not in this process.
_BETWEEN_S = 0.002
# Of L1, which the bytes on their way keep from eviction.
_SHARE_OF_L1 = 4


class Holder:
    """Listens at `listen` from `start` until `close`. An address that is taken is tried again; see `problem`."""

    def __init__(self, settings: Settings, listen: Address, node: Node) -> None:
        self.problem = ""
        self._settings = settings
        self._listen = listen
        self._node = node
        most = int(settings.options.lent_bytes)
        self._room = Room(min(most, node.arena_bytes // _SHARE_OF_L1) if node.arena_bytes else most)
        self._connections = Connections(settings.options.connections, str(listen))
        self._lent = Counter(values=0, nbytes=0, busy=0)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="peers-holder", daemon=True)

    def start(self) -> None:
        """Listen, now if it can. Blocks only for a resolver, if `listen` is a name."""
        self._listener = self._bound()
        self._thread.start()

    def close(self) -> None:
        """End all loans. Blocks for half a second at most."""
        self._closing.set()
        until = time.monotonic() + _JOIN_S
        with self._lock:
            if self._listener is not None:
                with contextlib.suppress(OSError):
                    self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        serving = self._connections.all()
        for wire in serving:
            wire.cut()
        for thread in (self._thread, *(each.thread for each in serving.values())):
            if thread is not None and thread.is_alive():
                thread.join(max(until - time.monotonic(), 0.0))

    def status(self) -> dict[str, object]:
        """For the server's status. Never blocks."""
        return {
            "at": str(self._listen),
            "connections": len(self._connections),
            "bytes_under_way": self._room.taken,
            "values": self._lent["values"],
            "nbytes": self._lent["nbytes"],
            "refused": {"busy": self._lent["busy"], **self._connections.counts},
            "strangers": self._connections.refused(),
        }

    def _run(self) -> None:
        listener = self._listener
        while True:
            if listener is not None:
                self._accept(listener)
                listener.close()
            if self._closing.wait(_AGAIN_S):
                return
            listener = self._bound()
            with self._lock:
                self._listener = listener

    def _bound(self) -> socket.socket | None:
        """The listening socket; None, with a `problem`, if there is none now."""
        listener = None
        try:
            listener = bound(self._listen)
            listener.listen(_BACKLOG)
        except OSError as error:
            fact = f"other nodes cannot load from this node: {self._listen}: {explain(error)}"
            if not self.problem:
                log.error("%s", fact)
            self.problem = fact
            if listener is not None:
                listener.close()
            return None
        self.problem = ""
        log.info("other nodes can load from L1 at %s", self._listen)
        return listener

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                sock, place = listener.accept()
            except ConnectionError:
                continue
            except OSError:
                if self._closing.wait(_AGAIN_S):  # such as no descriptors
                    return
                continue
            wire = Wire(sock)
            served = Served(str(place[0]))
            served.thread = threading.Thread(target=self._serve, args=(wire, served), name="peers-loan", daemon=True)
            if self._closing.is_set() or not self._connections.add(wire, served):
                wire.close()
            else:
                try:
                    served.thread.start()
                except RuntimeError:  # the machine has no more threads
                    self._connections.end(wire)
            self._closing.wait(_BETWEEN_S)

    def _serve(self, wire: Wire, served: Served) -> None:
        try:
            if not self._admits(wire, served.host):
                return
            self._connections.welcome(wire)
            while not self._closing.is_set():
                served.idle_since = time.monotonic()
                request: m.Ask | m.Get = wire.read(m.FromReader, time.monotonic() + _IDLE_S)  # type: ignore[arg-type]
                served.idle_since = None
                self._answer(wire, request)
        except (OSError, EOFError, m.ProtocolError) as error:
            log.debug("a connection to %s ended: %s", self._listen, explain(error))
        except Exception:
            log.exception("sending objects to a node failed")
        finally:
            self._connections.end(wire)

    def _admits(self, wire: Wire, host: str) -> bool:
        """False for a stranger, whose words are remembered; not for one that says nothing, as probes do."""
        try:
            admit(wire, self._settings, self._node, time.monotonic() + _HELLO_S)
        except ConfigFieldError as error:
            self._connections.refuse(host, error.fact)
        except ssl.SSLEOFError:
            raise
        except (m.ProtocolError, ssl.SSLError) as error:
            reason = explain(error) if isinstance(error, NotTrusted) else f"the caller is not a node: {explain(error)}"
            self._connections.refuse(host, visible(reason[: m.MOST_REASON]))
        else:
            return True
        return False

    def _answer(self, wire: Wire, request: m.Ask | m.Get) -> None:
        if isinstance(request, m.Ask):
            held = self._node.holds(m.split_keys(request.keys, m.ASK_KEYS))
            wire.write(m.Found(bytes(held)), time.monotonic() + _ANSWER_S)
            return
        keys = m.split_keys(request.keys, m.GET_KEYS)
        if len(keys) != len(request.rooms):
            raise m.ProtocolError(f"the request has {len(keys)} keys and {len(request.rooms)} sizes")
        deadline = time.monotonic() + min(request.left_ms / 1e3, _MOST_S)
        for key, room in zip(keys, request.rooms, strict=True):
            self._push(wire, key, room, deadline)

    def _push(self, wire: Wire, key: PackedKey, room: int, deadline: float) -> None:
        # Room first: what is pinned is on its way.
        now = time.monotonic()
        with self._room.held(room, now + min((deadline - now) / 4, _WAIT_S)) as there:
            status, loan = m.BUSY, None
            if there:
                status, loan = m.MISSING, self._node.lend(key)
            else:
                self._count(busy=1)
            if loan is None:
                wire.send([memoryview(m.VALUE_HEAD.pack(status, 0))], deadline)
                return
            with loan:
                if loan.nbytes > room:
                    wire.send([memoryview(m.VALUE_HEAD.pack(m.TOO_LONG, 0))], deadline)
                    return
                header, *rest = loan.parts()
                head = m.VALUE_HEAD.pack(m.VALUE, loan.nbytes) + header
                wire.send([memoryview(head), *rest], deadline)
                self._count(values=1, nbytes=loan.nbytes)

    def _count(self, **amounts: int) -> None:
        with self._lock:
            self._lent.update(amounts)


def bound(address: Address) -> socket.socket:
    """A socket bound to the `listen` of a node; the caller closes it. Raises `OSError`."""
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sock = socket.socket(found[0][0], socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(found[0][4])
    except OSError:
        sock.close()
        raise
    return sock
