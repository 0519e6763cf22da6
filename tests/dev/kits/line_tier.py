"""A correct tier over TCP, and its server: a small protocol for the tests of faults on the wire.

A request is an operation (1 byte), a key (72) and a value behind its length (u32); a reply is a status (1 byte) and a
value behind its length. Runs where there is no `tests` package: it is copied beside the kit's test files.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvframework.api.tier import Outcome, PackedKey, Tier
from kvframework.errors import TierError

T = TypeVar("T", bound="int | Outcome")
HEAD = struct.Struct("<c72sI")
REPLY = struct.Struct("<cI")
FOUND_OUT = {b"+": Outcome.FOUND, b"-": Outcome.MISSING}


class LineServer(socketserver.ThreadingTCPServer):
    """Keeps values as long as it runs. Each connection has a thread."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.values: dict[bytes, bytes] = {}
        self.address = ("127.0.0.1", self.server_address[1])
        self._serving = threading.Thread(target=self.serve_forever, args=(0.02,))
        self._serving.start()

    def close(self) -> None:
        self.shutdown()
        self._serving.join()
        self.server_close()


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        values = self.server.values  # type: ignore[attr-defined]
        with contextlib.suppress(OSError, EOFError):
            while True:
                operation, key, size = HEAD.unpack(receive(self.request, HEAD.size))
                data = receive(self.request, size)
                held = values.get(key)
                if operation == b"P":
                    values[key] = data
                elif operation == b"D":
                    values.pop(key, None)
                value = held if operation == b"G" and held is not None else b""
                self.request.sendall(REPLY.pack(b"-" if held is None else b"+", len(value)) + value)


class LineTier(Tier):
    """One connection, used by one call at a time; any trouble with it ends it, and the next call makes another."""

    name = "line"

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self.sock: socket.socket | None = None
        self.lock = threading.Lock()
        self.closed = False

    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        return self.each(b"C", keys, deadline, lambda _index, status, _value: FOUND_OUT[status])

    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        meaning = {b"+": Outcome.DELETED, b"-": Outcome.MISSING}
        return self.each(b"D", keys, deadline, lambda _index, status, _value: meaning[status])

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        values = [b"".join(each) for each in parts]
        return self.each(b"P", keys, deadline, lambda _index, _status, _value: Outcome.STORED, values)

    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        def take(index: int, status: bytes, value: bytes) -> int | Outcome:
            received = len(value)
            if status == b"-":
                return Outcome.MISSING
            if len(value) > sum(part.nbytes for part in parts[index]):
                return Outcome.DAMAGED
            for part in parts[index]:
                piece, value = value[: part.nbytes], value[part.nbytes :]
                part[: len(piece)] = piece
            return received

        return self.each(b"G", keys, deadline, take)

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError, AttributeError):
            self.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        with self.lock:
            self.drop()

    def each(
        self,
        operation: bytes,
        keys: Sequence[PackedKey],
        deadline: float,
        outcome: Callable[[int, bytes, bytes], T],
        values: Sequence[bytes] = (),
    ) -> list[T]:
        outcomes = []
        if not self.lock.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            raise TierError("another call took all the time", where=self.name)
        try:
            self.arm(deadline)
            for index, key in enumerate(keys):
                data = values[index] if values else b""
                sock = self.arm(deadline)
                sock.sendall(HEAD.pack(operation, key, len(data)) + data)
                status, size = REPLY.unpack(receive(self.arm(deadline), REPLY.size))
                if status not in FOUND_OUT:
                    raise ConnectionError(f"no status: {status!r}")
                outcomes.append(outcome(index, status, receive(self.arm(deadline), size)))
        except (OSError, EOFError) as error:
            fact = "the tier is closed" if self.closed else str(error)
            self.failed()
        else:
            return outcomes
        finally:
            self.lock.release()
        raise TierError(fact, where=self.name)

    def arm(self, deadline: float) -> socket.socket:
        """The connection, whose next step ends by the deadline."""
        if self.closed:
            raise ConnectionError("the tier is closed")
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the call's deadline has passed")
        if self.sock is None:
            self.sock = socket.socket()
            self.sock.settimeout(remaining)
            self.sock.connect(self.address)
        self.sock.settimeout(remaining)
        return self.sock

    def failed(self) -> None:
        self.drop()

    def drop(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None


def receive(sock: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes. Raises `EOFError`."""
    pieces = []
    while size:
        piece = sock.recv(min(size, 1 << 20))
        if not piece:
            raise EOFError("the connection was closed")
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
