"""The holder: lends what L1 has to other nodes that ask, and to no one else.

One thread accepts, one serves each connection, and none is the serving thread. Bounded: connections, connections of
those who have not proved themselves, bytes on their way. What is beyond a bound is refused at once: the reader then
asks another node, or computes. An object is pinned while its bytes go out, and never longer than the reader waits.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

from kvf_peers.handshake import NotTrusted, admit
from kvf_peers.messages import (
    ASK_KEYS,
    BUSY,
    GET_KEYS,
    MISSING,
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
from kvframework.api.node import Node, PackedKey

log = logging.getLogger(__name__)

# For TLS and the proofs; for one more request; for an answer without a value.
_HELLO_S, _IDLE_S, _ANSWER_S = 2.0, 120.0, 5.0
# Longest time that an object is pinned for one reader, whatever that says.
_MOST_S = 30.0
_STRANGERS = 16
_AGAIN_S = 1.0
_JOIN_S = 0.5
_BACKLOG = 64


class Holder:
    """Listens at `listen` from `start` until `close`. An address that is taken is tried again; see `problem`."""

    def __init__(self, settings: Settings, listen: Address, node: Node) -> None:
        self.problem = ""
        self._settings = settings
        self._listen = listen
        self._node = node
        self._room = Room(settings.options.lent_bytes)
        self._strangers = threading.Semaphore(_STRANGERS)
        self._lock = threading.Lock()
        self._wires: dict[Wire, threading.Thread] = {}
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
            serving = dict(self._wires)
            if self._listener is not None:
                with contextlib.suppress(OSError):
                    self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        for wire in serving:
            wire.cut()
        for thread in (self._thread, *serving.values()):
            if thread.is_alive():
                thread.join(max(until - time.monotonic(), 0.0))

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
            found = socket.getaddrinfo(*self._listen, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            listener = socket.socket(found[0][0], socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(found[0][4])
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
                sock, _ = listener.accept()
            except ConnectionError:
                continue
            except OSError:
                if self._closing.wait(_AGAIN_S):  # such as no descriptors
                    return
                continue
            wire = Wire(sock)
            thread = threading.Thread(target=self._serve, args=(wire,), name="peers-loan", daemon=True)
            with self._lock:
                full = len(self._wires) >= self._settings.options.connections or self._closing.is_set()
                if not full:
                    self._wires[wire] = thread
            if full:
                wire.close()
                continue
            try:
                thread.start()
            except RuntimeError:  # the machine has no more threads
                self._forget(wire)

    def _forget(self, wire: Wire) -> None:
        with self._lock:
            self._wires.pop(wire, None)
        wire.close()

    def _serve(self, wire: Wire) -> None:
        try:
            self._admit(wire)
            while not self._closing.is_set():
                self._answer(wire, wire.read(FromReader, time.monotonic() + _IDLE_S))  # type: ignore[arg-type]
        except NotTrusted as error:
            log.warning("a node was refused at %s: %s", self._listen, error)
        except (OSError, EOFError, ProtocolError) as error:
            log.debug("a connection to %s ended: %s", self._listen, explain(error))
        except Exception:
            log.exception("a loan failed")
        finally:
            self._forget(wire)

    def _admit(self, wire: Wire) -> None:
        if not self._strangers.acquire(blocking=False):
            raise ProtocolError("too many have not proved themselves")
        try:
            admit(wire, self._settings, self._node, time.monotonic() + _HELLO_S)
        finally:
            self._strangers.release()

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
        loan = self._node.lend(key)
        if loan is None:
            wire.send([memoryview(VALUE_HEAD.pack(MISSING, 0))], deadline)
            return
        with loan:
            if loan.nbytes > room:
                wire.send([memoryview(VALUE_HEAD.pack(TOO_LONG, 0))], deadline)
            elif not self._room.take(loan.nbytes):
                wire.send([memoryview(VALUE_HEAD.pack(BUSY, 0))], deadline)
            else:
                try:
                    header, *rest = loan.parts()
                    head = VALUE_HEAD.pack(VALUE, loan.nbytes) + header
                    wire.send([memoryview(head), *rest], deadline)
                finally:
                    self._room.give_back(loan.nbytes)


class Room:
    """Bytes on their way, at most `most` of them; one value alone may be larger. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        """Returns False, and takes nothing, where there is no room now."""
        with self._lock:
            if self._taken and self._taken + nbytes > self._most:
                return False
            self._taken += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self._taken -= nbytes
