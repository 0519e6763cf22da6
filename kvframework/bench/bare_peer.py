"""Owns the bare ZMQ peer's process: a ROUTER that echoes, swallows and sends, and does nothing else.

`python -m kvframework.bench.bare_peer ENDPOINT`; it ends when its standard input does, so it never outlives a bench.
"""

from __future__ import annotations

import sys

import zmq

ECHO, PUT, PUT_LAST, GET = b"echo", b"put", b"put last", b"get"


def serve(endpoint: str, end_fd: int) -> None:
    """Serves until `end_fd` is readable. Blocks."""
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


if __name__ == "__main__":
    serve(sys.argv[1], sys.stdin.fileno())
