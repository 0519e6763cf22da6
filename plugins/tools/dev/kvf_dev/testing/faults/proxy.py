"""`FaultProxy`: a stream proxy whose faults can be switched at any time. It knows no protocol. Runs in one thread."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections import Counter
from types import TracebackType
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


WIRE_FAULTS = {
    "slow": "every piece of a reply waits for `amount` seconds",
    "cut": "a connection is closed once `amount` bytes of replies went through it",
    "flip": "one bit of every `amount`-th byte of a connection's replies is another",
    "refuse": "connections are reset, the open ones at once and new ones as they come",
    "stall": "nothing passes, and nothing is closed",
    "reset": "a connection is reset when the first byte of a reply comes",
}
_AMOUNTS = {"slow": 0.01, "cut": 100.0, "flip": 100.0}

_CONNECT_S = 1.0
_SWITCH_S = 10.0

Address = tuple[str, int] | str


class FaultProxy:
    """A proxy in front of `target`, a pair of host and port or the path of a Unix socket; it listens on the same kind
    of socket. The tier connects to `address`. Use it as a context manager.

    One fault at a time, from `inject` to `heal`; `injected` counts how often each kind took place. A switch affects
    open connections too, and restarts the count of their bytes. Only one thread may switch faults at a time.
    """

    def __init__(self, target: Address) -> None:
        self.injected: Counter[str] = Counter()
        self._target = target
        self._directory = ""
        self._listener = self._listen()
        self._listener.setblocking(False)
        self.address: Address = self._listener.getsockname()
        self._bell, self._rope = socket.socketpair()
        self._fault = Fault("", 0.0)
        self._begun = threading.Event()
        self._connections: list[Connection] = []
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="fault proxy", daemon=True)

    @property
    def port(self) -> int:
        """The TCP port; 0 for a Unix socket."""
        return 0 if isinstance(self.address, str) else self.address[1]

    def inject(self, kind: str, amount: float | None = None) -> None:
        """Switch to a fault of `WIRE_FAULTS`; returns once the fault is active. Raises `ValueError` for an unknown
        fault.
        """
        if kind not in WIRE_FAULTS:
            raise ValueError(f"no such fault: {kind!r}; there are {', '.join(WIRE_FAULTS)}")
        self._switch(Fault(kind, _AMOUNTS.get(kind, 0.0) if amount is None else amount))

    def heal(self) -> None:
        """End the fault: stalled connections continue, and new connections pass unchanged."""
        self._switch(Fault("", 0.0))

    def start(self) -> None:
        """Start to relay; connections made earlier wait until then."""
        self._thread.start()

    def close(self) -> None:
        """Close all connections and end the thread. Idempotent; blocks for a moment."""
        if not self._stop:
            self._stop = True
            self._rope.send(b"!")
            if self._thread.ident is not None:
                self._thread.join()
            for sock in (self._listener, self._bell, self._rope):
                sock.close()
            if self._directory:
                shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> FaultProxy:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _listen(self) -> socket.socket:
        if not isinstance(self._target, str):
            return socket.create_server(("127.0.0.1", 0))
        self._directory = tempfile.mkdtemp(prefix="kvf-proxy-")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(os.path.join(self._directory, "proxy.sock"))
        listener.listen()
        return listener

    def _switch(self, fault: Fault) -> None:
        self._begun.clear()
        self._fault = fault
        self._rope.send(b"!")
        if not self._begun.wait(_SWITCH_S):
            raise TimeoutError("the proxy does not run")

    def _run(self) -> None:
        fault = self._fault
        while not self._stop:
            if fault is not self._fault:
                fault = self._fault
                self._begin(fault)
                self._begun.set()
            wanted: dict[socket.socket, int] = {self._bell: select.POLLIN, self._listener: select.POLLIN}
            timeout_s = None
            for connection in self._connections:
                wait_s = connection.wants(wanted, stalled=fault.kind == "stall")
                if wait_s is not None:
                    timeout_s = wait_s if timeout_s is None else min(timeout_s, wait_s)
            ready = _poll(wanted, timeout_s)
            if self._bell in ready:
                self._bell.recv(4096)
            if self._listener in ready:
                self._accept(fault)
            for connection in self._connections:
                connection.turn(ready, fault, self.injected)
            self._connections = [connection for connection in self._connections if connection.open]
        for connection in self._connections:
            connection.close()

    def _begin(self, fault: Fault) -> None:
        for connection in self._connections:
            connection.begin()
            if fault.kind == "refuse":
                self.injected["refuse"] += 1
                connection.reset()
            if fault.kind == "stall":
                self.injected["stall"] += 1
        self._connections = [connection for connection in self._connections if connection.open]

    def _accept(self, fault: Fault) -> None:
        try:
            outer, _ = self._listener.accept()
        except OSError:  # the client has already disconnected
            return
        if fault.kind == "refuse":
            self.injected["refuse"] += 1
            reset(outer)
            return
        inner = socket.socket(socket.AF_UNIX if isinstance(self._target, str) else socket.AF_INET)
        inner.settimeout(_CONNECT_S)
        try:
            inner.connect(self._target)
        except OSError:
            inner.close()
            reset(outer)
            return
        if fault.kind == "stall":
            self.injected["stall"] += 1
        self._connections.append(Connection(outer, inner))


def _poll(wanted: dict[socket.socket, int], timeout_s: float | None) -> dict[socket.socket, int]:
    poller = select.poll()
    by_number = {sock.fileno(): sock for sock in wanted}
    for sock, events in wanted.items():
        poller.register(sock, events)
    found = poller.poll(None if timeout_s is None else timeout_s * 1000 + 1)
    return {by_number[number]: events for number, events in found}
