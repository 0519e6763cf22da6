"""The TCP reference: bytes to another process of this machine and back, over one connection of the loopback interface,
by `sendall` and `recv_into` memory that is there. No names, no records, no checks. Each value has a separate place in
the peer's memory, as in a store: one place for all of them would stay in the processor's cache.

`python -m kvframework_bench.tcp_reference` is the peer's process. It writes its port as a line, serves one connection,
and ends with its standard input, so it never outlives a benchmark.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvframework.errors import KVFrameworkError
from kvframework_bench.process import BenchChild, LineChannel, running

_REQUEST = struct.Struct("<cQQ")
_ROOM, _PUT, _GET, _DONE = b"r", b"p", b"g", b"d"
_TIMEOUT_S = 20.0


def serve(listener: socket.socket) -> None:
    """Serve one connection to its end. Blocks."""
    connection, _ = listener.accept()
    memory = memoryview(b"")
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while request := connection.recv(_REQUEST.size, socket.MSG_WAITALL):
            operation, at, nbytes = _REQUEST.unpack(request)
            if operation == _ROOM:
                memory = memoryview(mmap.mmap(-1, nbytes))
            elif operation == _PUT:
                _receive(connection, memory[at : at + nbytes])
            if operation == _GET:
                connection.sendall(memory[at : at + nbytes])
            else:
                connection.sendall(_DONE)


class TcpPeer:
    """A connection to the peer. Its calls return the seconds. Raises `BenchFailed` where the peer does not answer."""

    def __init__(self, connection: socket.socket, child: BenchChild) -> None:
        self._connection = connection
        self._child = child

    def make_room(self, nbytes: int) -> None:
        """Have the peer forget all, and have memory for as much."""
        self._send(_ROOM, 0, nbytes)
        self._await_done()

    def put(self, sources: Sequence[memoryview]) -> float:
        """Send all of `sources`; the peer keeps one behind the other."""
        started, at = time.perf_counter(), 0
        for source in sources:
            self._send(_PUT, at, source.nbytes, source)
            self._await_done()
            at += source.nbytes
        return time.perf_counter() - started

    def get(self, targets: Sequence[memoryview]) -> float:
        """Fill `targets` with what was put there, of as many bytes each."""
        started, at = time.perf_counter(), 0
        for target in targets:
            self._send(_GET, at, target.nbytes)
            self._receive(target)
            at += target.nbytes
        return time.perf_counter() - started

    def _send(self, operation: bytes, at: int, nbytes: int, source: memoryview | None = None) -> None:
        try:
            self._connection.sendall(_REQUEST.pack(operation, at, nbytes))
            if source is not None:
                self._connection.sendall(source)
        except OSError as error:
            raise self._failure(error) from error

    def _await_done(self) -> None:
        self._receive(memoryview(bytearray(len(_DONE))))

    def _receive(self, target: memoryview) -> None:
        try:
            _receive(self._connection, target)
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> KVFrameworkError:
        return self._child.failure(f"does not answer: {error}")


@contextmanager
def running_tcp_peer(directory: Path) -> Iterator[TcpPeer]:
    """Yield a new peer process, which ends with the context."""
    command = [sys.executable, "-m", "kvframework_bench.tcp_reference"]
    with running("bare TCP peer", command, directory, piped=True) as child:
        port = int(LineChannel(child).receive())
        with socket.create_connection(("127.0.0.1", port), _TIMEOUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield TcpPeer(connection, child)


def _receive(connection: socket.socket, target: memoryview) -> None:
    at = 0
    while at < target.nbytes:
        received = connection.recv_into(target[at:])
        if not received:
            raise ConnectionError("it closed the connection")
        at += received


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_end_with_input, daemon=True).start()
        sys.stdout.write(f"{listening.getsockname()[1]}\n")
        sys.stdout.flush()
        serve(listening)
