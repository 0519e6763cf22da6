"""The bytes of one connection between two nodes: sent straight from the arena, received straight into it.

Used by one thread at a time; only `cut` may come from another. Every call takes an absolute deadline on
`time.monotonic()` and raises `TimeoutError` when it passes, another `OSError` when the connection breaks, and
`ProtocolError`; after any of them the connection must be closed. A closed connection writes nowhere any more.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import select
import socket
import ssl
import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from kvf_peers import messages as m
from kvf_peers.settings import Settings
from kvframework.api.process import visible
from kvframework.api.tier import Node

M = TypeVar("M")
# A piece of a value: one system call, so a deadline is seen between two.
PIECE_BYTES = 4 << 20
_TLS_PIECE_BYTES = 256 << 10


class Wire:
    """One connected socket, which it owns."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self.opened_at = time.monotonic()
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connect(self, place: tuple[object, ...], deadline: float) -> None:
        """Connect an unconnected socket."""
        self._arm(deadline)
        self._sock.connect(place)

    def start_tls(self, context: ssl.SSLContext, deadline: float, *, host: str = "") -> None:
        """Begin TLS: as the client if `host` names the server. Blocks."""
        self._arm(deadline)
        self._sock = context.wrap_socket(self._sock, server_side=not host, server_hostname=host or None)
        self._is_tls = True

    def write(self, message: msgspec.Struct, deadline: float) -> None:
        self.send([memoryview(m.encoded(message))], deadline)

    def read(self, kind: type[M], deadline: float, most: int = m.MOST_BYTES) -> M:
        """Receive one message of at most `most` bytes. Raises `EOFError` if the other side has ended between two."""
        head = bytearray(m.LENGTH.size)
        self.receive_into(memoryview(head), deadline, may_end=True)
        (size,) = m.LENGTH.unpack(head)
        if size > most:
            raise m.ProtocolError(f"the message has {size} bytes, expected at most {most}")
        body = bytearray(size)
        self.receive_into(memoryview(body), deadline)
        return m.decoded(bytes(body), kind)

    def send(self, parts: Sequence[memoryview], deadline: float) -> None:
        """Send all of `parts`, borrowed until it returns."""
        if self._is_tls:
            for part in parts:
                at = 0
                while at < part.nbytes:
                    self._arm(deadline)  # before each record: `sendall` would wait that long for each of them
                    at += self._sock.send(part[at : at + _TLS_PIECE_BYTES])
            return
        waiting = [part[at : at + PIECE_BYTES] for part in parts for at in range(0, part.nbytes, PIECE_BYTES)]
        first = 0
        while first < len(waiting):
            self._arm(deadline)
            sent = self._sock.sendmsg(waiting[first : first + 2])
            while sent:
                size = waiting[first].nbytes
                if sent < size:
                    waiting[first] = waiting[first][sent:]
                    break
                sent -= size
                first += 1

    def receive_into(self, view: memoryview, deadline: float, *, may_end: bool = False) -> None:
        """Fill `view`. Raises `EOFError` if the other side has ended: with `may_end` before the first byte, else it
        is a `ConnectionResetError`."""
        at = 0
        while at < view.nbytes:
            self._arm(deadline)
            count = self._sock.recv_into(view[at:])
            if not count:
                if may_end and not at:
                    raise EOFError
                raise ConnectionResetError(errno.ECONNRESET, "the other node closed the connection")
            at += count

    def is_quiet(self) -> bool:
        """False if an idle connection has bytes in it or was closed. Never blocks."""
        poller = select.poll()
        try:
            poller.register(self._sock, select.POLLIN)
        except (OSError, ValueError):
            return False
        return not poller.poll(0)

    def cut(self) -> None:
        """End the connection while another thread may be using it, which then gets an error. Never blocks."""
        with contextlib.suppress(OSError):
            # Not that of `SSLSocket`, after which the other thread would go on in plain text.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the socket. Never blocks."""
        with contextlib.suppress(OSError):
            self._sock.close()

    def _arm(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(errno.ETIMEDOUT, "the call's deadline has passed")
        self._sock.settimeout(left)


def explain(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "the node did not answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the node's certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or 'no TLS'}"
    if isinstance(error, EOFError):
        return "the node closed the connection"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


class NotTrusted(m.ProtocolError):
    """One of the two sides does not know the token of the other, or speaks another version."""


def introduce(wire: Wire, settings: Settings, host: str, deadline: float) -> m.Welcome:
    """The reader's side: returns who the holder is. Raises `OSError`, `EOFError`, `ProtocolError`."""
    if settings.tls is not None:
        wire.start_tls(settings.tls.contexts()[0], deadline, host=host)
    token = settings.token()
    greeting = wire.read(m.Greeting, deadline, m.STRANGER_BYTES)
    if greeting.version != m.VERSION:
        raise NotTrusted(f"the node speaks protocol version {greeting.version}, this node {m.VERSION}")
    nonce = os.urandom(m.NONCE_BYTES)
    said = m.proof(token, b"reader", greeting.nonce, nonce)
    wire.write(m.Hello(m.VERSION, nonce, said), deadline)
    answer: m.Welcome | m.Refused = wire.read(m.FromHolder, deadline)  # type: ignore[arg-type]
    if isinstance(answer, m.Refused):
        raise NotTrusted(f"the node refuses this node: {visible(answer.reason[: m.MOST_REASON])}")
    if not hmac.compare_digest(answer.proof, m.proof(token, b"holder", greeting.nonce, nonce)):
        raise NotTrusted("the node has another token")
    return answer


def admit(wire: Wire, settings: Settings, node: Node, deadline: float) -> None:
    """The holder's side. Raises `OSError`, `EOFError`, `ProtocolError`, the latter to one that does not know the token,
    which has got the reason."""
    if settings.tls is not None:
        wire.start_tls(settings.tls.contexts()[1], deadline)
    nonce = os.urandom(m.NONCE_BYTES)
    wire.write(m.Greeting(m.VERSION, nonce), deadline)
    hello = wire.read(m.FromStranger, deadline, m.STRANGER_BYTES)
    token = settings.token()
    if hello.version != m.VERSION:
        wire.write(m.Refused(f"this node speaks protocol version {m.VERSION}"), deadline)
        raise NotTrusted(f"the caller speaks protocol version {hello.version}")
    if not hmac.compare_digest(hello.proof, m.proof(token, b"reader", nonce, hello.nonce)):
        wire.write(m.Refused("the nodes have different tokens"), deadline)
        raise NotTrusted("the caller has another token")
    identity = node.identity
    wire.write(
        m.Welcome(
            m.proof(token, b"holder", nonce, hello.nonce),
            identity.boot_id,
            identity.chunk_size,
            identity.hasher,
            told_models(node),
        ),
        deadline,
    )


def told_models(node: Node) -> dict[str, list[bytes]]:
    """The models of a node, as many as a message tells."""
    models = sorted(node.models().items())[: m.MOST_MODELS]
    return {name: sorted(namespaces)[: m.MOST_NAMESPACES] for name, namespaces in models}
