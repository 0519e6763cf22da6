"""The TCP reference: bytes to another process of this machine and back, over one connection of the loopback interface,
by `sendall` and `recv_into` memory that is there. No names, no records, no checks.

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvframework_bench.process import BenchChild, LineChannel, running

_REQUEST = struct.Struct("<cQ")
_PUT, _GET, _DONE = b"p", b"g", b"d"
_TIMEOUT_S = 20.0


def serve(listener: socket.socket) -> None:
    """Serve one connection to its end. Blocks."""
    connection, _ = listener.accept()
    memory = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while request := connection.recv(_REQUEST.size, socket.MSG_WAITALL):
            operation, nbytes = _REQUEST.unpack(request)
            if nbytes > memory.nbytes:
                memory = memoryview(mmap.mmap(-1, nbytes))
            if operation == _PUT:
                _receive(connection, memory[:nbytes])
                connection.sendall(_DONE)
            else:
                connection.sendall(memory[:nbytes])


class TcpPeer:
    """A connection to the peer. Its calls return the seconds. Raises `BenchFailed` where the peer does not answer."""

    def __init__(self, connection: socket.socket, child: BenchChild) -> None:
        self._connection = connection
        self._child = child

    def put(self, source: memoryview) -> float:
        """Send all of `source`; the peer keeps it."""
        started = time.perf_counter()
        try:
            self._connection.sendall(_REQUEST.pack(_PUT, source.nbytes))
            self._connection.sendall(source)
            _receive(self._connection, memoryview(bytearray(len(_DONE))))
        except OSError as error:
            raise self._child.failure(f"does not answer: {error}") from error
        return time.perf_counter() - started

    def get(self, target: memoryview) -> float:
        """Fill `target` with the beginning of what was put last."""
        started = time.perf_counter()
        try:
            self._connection.sendall(_REQUEST.pack(_GET, target.nbytes))
            _receive(self._connection, target)
        except OSError as error:
            raise self._child.failure(f"does not answer: {error}") from error
        return time.perf_counter() - started


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
