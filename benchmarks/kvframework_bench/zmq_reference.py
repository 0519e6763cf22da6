"""The ZMQ reference: echoes and bulk transfers over a plain socket, without the framework's protocol.

`python -m kvframework_bench.zmq_reference ENDPOINT` is the peer's process: a ROUTER that echoes, discards and
sends. It ends with its standard input, so it never outlives a benchmark.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from kvframework_bench.process import BenchChild, running

ECHO, PUT, PUT_LAST, GET = b"echo", b"put", b"put last", b"get"


def serve(endpoint: str, end_fd: int) -> None:
    """Serve until `end_fd` is readable. Blocks."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(end_fd, zmq.POLLIN)
    try:
        router.bind(endpoint)
        while end_fd not in (ready := dict(poller.poll())):
            if router in ready:
                _answer(router)
    finally:
        context.destroy(0)


def _answer(router: zmq.Socket[bytes]) -> None:
    peer, operation, payload = router.recv_multipart(copy=False)
    name = operation.bytes
    if name == ECHO:
        router.send_multipart([peer, payload], copy=False)
    elif name == PUT_LAST:
        router.send_multipart([peer, b""])
    elif name == GET:
        count, size = (int(word) for word in payload.bytes.split())
        frame = bytearray(size)
        for _ in range(count):
            router.send_multipart([peer, frame], copy=False)


_TIMEOUT_MS = 20_000


class ZmqPeer:
    """A connected DEALER. Every call blocks until its answer arrives and returns the seconds.

    Raises `BenchFailed` if there is none. For one thread.
    """

    def __init__(self, dealer: zmq.Socket[bytes], child: BenchChild, endpoint: str) -> None:
        self.endpoint = endpoint
        self._dealer = dealer
        self._child = child
        self._frames: dict[int, bytearray] = {}

    @property
    def pid(self) -> int:
        return self._child.pid

    def echo(self, payload: bytes) -> float:
        """Send one message there and back."""
        started = time.perf_counter()
        self._dealer.send_multipart([ECHO, payload])
        answer = self._receive()
        seconds = time.perf_counter() - started
        if answer.buffer.nbytes != len(payload):
            raise self._child.failure(f"echoed {answer.buffer.nbytes} bytes of {len(payload)}")
        return seconds

    def put(self, nbytes: int, frame_bytes: int) -> float:
        """Send `nbytes` in messages of `frame_bytes`, without a copy here."""
        sizes = _cut(nbytes, frame_bytes)
        frames = [self._frame(size) for size in sizes]
        started = time.perf_counter()
        for frame in frames[:-1]:
            self._dealer.send_multipart([PUT, frame], copy=False)
        self._dealer.send_multipart([PUT_LAST, frames[-1]], copy=False)
        self._receive()
        return time.perf_counter() - started

    def get(self, nbytes: int, frame_bytes: int) -> float:
        """Receive `nbytes` in messages of `frame_bytes`, a divisor, without a copy here."""
        count, rest = divmod(nbytes, frame_bytes)
        if rest:
            raise ValueError(f"{nbytes} bytes are not a whole number of messages of {frame_bytes} bytes")
        started = time.perf_counter()
        self._dealer.send_multipart([GET, b"%d %d" % (count, frame_bytes)])
        for _ in range(count):
            self._receive()
        return time.perf_counter() - started

    def _frame(self, size: int) -> bytearray:
        return self._frames.setdefault(size, bytearray(b"\x5a" * size))

    def _receive(self) -> zmq.Frame:
        try:
            return self._dealer.recv_multipart(copy=False)[-1]
        except zmq.Again:
            raise self._child.failure("does not answer") from None


@contextmanager
def running_zmq_peer(directory: Path) -> Iterator[ZmqPeer]:
    """Yield a new peer process on an `ipc://` socket in `directory`. Waits for its first answer; the process ends with
    the context."""
    endpoint = f"ipc://{directory}/bare.sock"
    context = zmq.Context()
    try:
        with running(
            "bare peer", [sys.executable, "-m", "kvframework_bench.zmq_reference", endpoint], directory
        ) as child:
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.RCVTIMEO, _TIMEOUT_MS)
            dealer.setsockopt(zmq.SNDTIMEO, _TIMEOUT_MS)
            dealer.setsockopt(zmq.RECONNECT_IVL, 5)
            dealer.connect(endpoint)
            peer = ZmqPeer(dealer, child, endpoint)
            peer.echo(b"hello")
            yield peer
    finally:
        context.destroy(0)


def _cut(nbytes: int, frame_bytes: int) -> list[int]:
    whole, rest = divmod(nbytes, frame_bytes)
    return [frame_bytes] * whole + ([rest] if rest else [])


if __name__ == "__main__":
    serve(sys.argv[1], sys.stdin.fileno())
