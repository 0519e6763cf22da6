"""The reference for the Redis tier: one blocking socket that sends values from the caller's memory and receives
them into it. No tier, no envelope, no deadline but the socket's.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvframework.api.plugin import Buffer
from kvframework_bench.errors import BenchFailed
from kvframework_bench.l2.redis_server import RedisChild
from kvframework_bench.rounds import Case, Rounds, percentile

_TIMEOUT_S = 30
_END = b"\r\n"
_COUNT = b"local n = 0 for _, k in ipairs(redis.call('KEYS', '*')) do n = n + redis.call('STRLEN', k) end return n"


class BareRedis:
    """A connected client. `put` and `get` block and return the seconds they took. Raises `BenchFailed`. For one thread.

    `under_way` is the number of commands sent before the first reply is awaited.
    """

    def __init__(self, sock: socket.socket, redis: RedisChild) -> None:
        self._sock = sock
        self._redis = redis

    def put(self, keys: Sequence[bytes], values: Sequence[memoryview], *, under_way: int = 1) -> float:
        def send(index: int) -> None:
            head = _words(b"SET", keys[index], last_bytes=values[index].nbytes)
            self._send([head, values[index], _END])

        return self._carry(len(keys), under_way, send, lambda _index: self._expect(b"+OK\r\n"))

    def get(self, keys: Sequence[bytes], targets: Sequence[memoryview], *, under_way: int = 1) -> float:
        """Each value must be exactly as long as its target."""

        def receive(index: int) -> None:
            self._expect(b"$%d\r\n" % targets[index].nbytes)
            self._receive(targets[index])
            self._expect(_END)

        return self._carry(len(keys), under_way, lambda index: self._send([_command(b"GET", keys[index])]), receive)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete the keys, at least one of which exists."""
        self._send([_command(b"DEL", *keys)])
        self._line()

    def stored_bytes(self) -> int:
        """Return the bytes of all values. Redis's own counts of its memory include more, such as buffers of clients."""
        self._send([_command(b"EVAL", _COUNT, b"0")])
        return int(self._line()[1:])

    def info(self, section: bytes) -> dict[str, str]:
        """Return a section of INFO."""
        self._send([_command(b"INFO", section)])
        text = bytearray(int(self._line()[1:]))
        self._receive(memoryview(text))
        self._expect(_END)
        fields = (line.partition(":") for line in text.decode().splitlines())
        return {name: value for name, colon, value in fields if colon}

    def _carry(self, count: int, under_way: int, send: Callable[[int], None], receive: Callable[[int], None]) -> float:
        started = time.perf_counter()
        try:
            for index in range(count + under_way - 1):
                if index < count:
                    send(index)
                if 0 <= index - under_way + 1 < count:
                    receive(index - under_way + 1)
        except OSError as error:
            raise self._redis.failure(f"does not answer a bare client: {error}") from error
        return time.perf_counter() - started

    def _send(self, buffers: Sequence[Buffer]) -> None:
        views = [memoryview(buffer) for buffer in buffers]
        while views:
            sent = self._sock.sendmsg(views)
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if sent:
                views[0] = views[0][sent:]

    def _receive(self, view: memoryview) -> None:
        while view.nbytes:
            received = self._sock.recv_into(view)
            if not received:
                raise self._redis.failure("closed the connection of a bare client")
            view = view[received:]

    def _expect(self, reply: bytes) -> None:
        found = bytearray(len(reply))
        self._receive(memoryview(found))
        if found != reply:
            raise BenchFailed(f"Redis answered {bytes(found)!r} to a bare client", available=repr(reply))

    def _line(self) -> bytes:
        line = bytearray()
        while not line.endswith(_END):
            byte = bytearray(1)
            self._receive(memoryview(byte))
            line += byte
        return bytes(line[:-2])


@contextmanager
def bare_client(redis: RedisChild) -> Iterator[BareRedis]:
    """Yield a client that is connected by the Unix socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        # The socket's own limits: Python's timeout would add a poll to every call.
        for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", _TIMEOUT_S, 0))
        sock.connect(str(redis.socket))
        yield BareRedis(sock, redis)


def _command(*words: bytes) -> bytes:
    return _words(*words[:-1], last_bytes=len(words[-1])) + words[-1] + _END


def _words(*words: bytes, last_bytes: int) -> bytes:
    """Return a command up to its last word, of which only the length is known here."""
    counted = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
    return b"*%d\r\n%b$%d\r\n" % (len(words) + 1, counted, last_bytes)


# Commands under way. More of them only grow the server's own buffers.
WAYS = {"one at a time": 1, "two under way": 2}


def bare_cases(operation: str, case: Callable[[int], float]) -> dict[str, Case]:
    """Return every way of an operation as a case of its own; `case` takes the number of commands under way."""
    return {_name(operation, way): _with(case, under_way) for way, under_way in WAYS.items()}


def fastest_way(operation: str, measured: Mapping[str, Rounds]) -> tuple[str, Rounds]:
    """Return the way with the smallest median, and its seconds."""
    ways = [(way, measured[_name(operation, way)]) for way in WAYS]
    return min(ways, key=lambda each: percentile(sorted(s for samples in each[1] for s in samples), 0.5))


def _name(operation: str, way: str) -> str:
    return f"bare {operation}, {way}"


def _with(case: Callable[[int], float], under_way: int) -> Case:
    return lambda: case(under_way)
