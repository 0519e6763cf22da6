"""A proxied connection: bytes move both ways, subject to the active fault. Driven by the proxy's thread."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections import Counter
from typing import NamedTuple

_PIECE = 1 << 18
_RESET = struct.pack("ii", 1, 0)  # linger for no time: close() sends a reset


class Fault(NamedTuple):
    """A kind of `WIRE_FAULTS` and its amount; the kind is "" for no fault."""

    kind: str
    amount: float


class Connection:
    """A client's connection to the proxy, and the proxy's connection to the target."""

    def __init__(self, outer: socket.socket, inner: socket.socket) -> None:
        self.open = True
        self._sockets = (outer, inner)
        for sock in self._sockets:
            sock.setblocking(False)
            if sock.family == socket.AF_INET:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._requests, self._replies = _Pipe(outer, inner), _Pipe(inner, outer)

    def begin(self) -> None:
        """Reset the byte count and delay at the start or end of a fault."""
        self._replies.count, self._replies.ready_at = 0, 0.0

    def wants(self, wanted: dict[socket.socket, int], *, stalled: bool) -> float | None:
        """Add the events to poll for; returns the seconds until a delayed piece is due, None without one."""
        if stalled:
            return None
        self._requests.wants(wanted)
        return self._replies.wants(wanted)

    def turn(self, ready: dict[socket.socket, int], fault: Fault, injected: Counter[str]) -> None:
        """Move the available bytes, subject to the fault."""
        if fault.kind == "stall":
            return
        try:
            self._requests.turn(ready)
            if self._replies.read(ready):
                self._spoil(fault, injected)
            if self.open:
                self._replies.write(ready)
        except OSError:
            self.close()
        if self.open and fault.kind == "cut" and self._replies.count >= fault.amount and not self._replies.pending:
            injected["cut"] += 1
            self.close()
        if self.open and self._requests.ended and self._replies.ended:
            self.close()

    def _spoil(self, fault: Fault, injected: Counter[str]) -> None:
        """Apply the fault to a piece of a reply that was just read."""
        pipe = self._replies
        first, pipe.count = pipe.count, pipe.count + len(pipe.pending)
        if fault.kind == "slow":
            injected["slow"] += 1
            pipe.ready_at = time.monotonic() + fault.amount
        elif fault.kind == "cut":
            del pipe.pending[max(int(fault.amount) - first, 0) :]
        elif fault.kind == "flip":
            every = max(int(fault.amount), 1)
            for at in range(every - 1 - first % every, len(pipe.pending), every):
                injected["flip"] += 1
                pipe.pending[at] ^= 0x10
        elif fault.kind == "reset":
            injected["reset"] += 1
            self.reset()

    def reset(self) -> None:
        self.open = False
        for sock in self._sockets:
            reset(sock)

    def close(self) -> None:
        self.open = False
        for sock in self._sockets:
            sock.close()


class _Pipe:
    """One direction. Reads only when all earlier bytes have been written."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.pending = bytearray()
        self.ready_at = 0.0
        self.count = 0
        self.ended = False
        self._source = source
        self._sink = sink

    def wants(self, wanted: dict[socket.socket, int]) -> float | None:
        late = self.ready_at - time.monotonic()
        if self.pending and late > 0:
            return late
        if self.pending:
            wanted[self._sink] = wanted.get(self._sink, 0) | select.POLLOUT
        elif not self.ended:
            wanted[self._source] = wanted.get(self._source, 0) | select.POLLIN
        return None

    def turn(self, ready: dict[socket.socket, int]) -> None:
        self.read(ready)
        self.write(ready)

    def read(self, ready: dict[socket.socket, int]) -> bool:
        """Read one piece; True if there was one."""
        if self.pending or self.ended or not ready.get(self._source, 0) & ~select.POLLOUT:
            return False
        try:
            self.pending += self._source.recv(_PIECE)
        except BlockingIOError:
            return False
        if not self.pending:
            self.ended = True
            self._sink.shutdown(socket.SHUT_WR)
        return bool(self.pending)

    def write(self, ready: dict[socket.socket, int]) -> None:
        if self.pending and time.monotonic() >= self.ready_at:
            with contextlib.suppress(BlockingIOError):
                del self.pending[: self._sink.send(self.pending)]


def reset(sock: socket.socket) -> None:
    """Close a connection by a TCP reset; a Unix socket is closed plainly."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()
