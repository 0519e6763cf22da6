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
from collections import Counter

from kvf_peers.bounds import Connections, Room, Served
from kvf_peers.handshake import NotTrusted, admit
from kvf_peers.messages import (
    ASK_KEYS,
    BUSY,
    GET_KEYS,
    MISSING,
    MOST_REASON,
    TOO_LONG,
    VALUE,
    VALUE_HEAD,
    Ask,
    Found,
    FromReader,
    Get,
    ProtocolError,
    split_keys,
)
from kvf_peers.settings import Address, Settings
from kvf_peers.wire import Wire, explain
from kvframework.api.keys import PackedKey
from kvframework.api.process import visible
from kvframework.api.tier import Node
from kvframework.errors import ConfigFieldError

log = logging.getLogger(__name__)

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
        """Listens, now if it can. Blocks only for a resolver, if `listen` is a name."""
        self._listener = self._bound()
        self._thread.start()

    def close(self) -> None:
        """Ends all loans. Blocks for half a second at most."""
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
            fact = f"nothing is lent: {self._listen}: {explain(error)}"
            if not self.problem:
                log.error("%s", fact)
            self.problem = fact
            if listener is not None:
                listener.close()
            return None
        self.problem = ""
        log.info("lends L1 to other nodes at %s", self._listen)
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
                request: Ask | Get = wire.read(FromReader, time.monotonic() + _IDLE_S)  # type: ignore[arg-type]
                served.idle_since = None
                self._answer(wire, request)
        except (OSError, EOFError, ProtocolError) as error:
            log.debug("a connection to %s ended: %s", self._listen, explain(error))
        except Exception:
            log.exception("a loan failed")
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
        except (ProtocolError, ssl.SSLError) as error:
            reason = explain(error) if isinstance(error, NotTrusted) else f"it is no node: {explain(error)}"
            self._connections.refuse(host, visible(reason[:MOST_REASON]))
        else:
            return True
        return False

    def _answer(self, wire: Wire, request: Ask | Get) -> None:
        if isinstance(request, Ask):
            held = self._node.holds(split_keys(request.keys, ASK_KEYS))
            wire.write(Found(bytes(held)), time.monotonic() + _ANSWER_S)
            return
        keys = split_keys(request.keys, GET_KEYS)
        if len(keys) != len(request.rooms):
            raise ProtocolError(f"{len(keys)} keys with {len(request.rooms)} rooms")
        deadline = time.monotonic() + min(request.left_ms / 1e3, _MOST_S)
        for key, room in zip(keys, request.rooms, strict=True):
            self._push(wire, key, room, deadline)

    def _push(self, wire: Wire, key: PackedKey, room: int, deadline: float) -> None:
        # Room first: what is pinned is on its way.
        now = time.monotonic()
        with self._room.held(room, now + min((deadline - now) / 4, _WAIT_S)) as there:
            status, loan = BUSY, None
            if there:
                status, loan = MISSING, self._node.lend(key)
            else:
                self._count(busy=1)
            if loan is None:
                wire.send([memoryview(VALUE_HEAD.pack(status, 0))], deadline)
                return
            with loan:
                if loan.nbytes > room:
                    wire.send([memoryview(VALUE_HEAD.pack(TOO_LONG, 0))], deadline)
                    return
                header, *rest = loan.parts()
                head = VALUE_HEAD.pack(VALUE, loan.nbytes) + header
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
