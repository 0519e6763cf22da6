"""Owns where a server listens: one ROUTER per endpoint, and identities that tell all their peers apart.

An identity is one byte for the endpoint, then ZMQ's routing id. Serving thread only, after `open`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvframework.api import Buffer
from kvframework.config import parse_endpoint
from kvframework.messaging import frames_io
from kvframework.messaging.curve import ServerKeys
from kvframework.messaging.endpoint import private_umask

FLUSH_MS = 200
# Of newcomers that ZMQ has not accepted yet: so many still come in after the gate has shut.
BACKLOG = 128
_HEAD_FRAMES = 1 + frames_io.HEAD_FRAMES


class Listeners:
    """The ROUTERs of one server. Borrows the context; `close` before its end."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.sockets: list[frames_io.Socket] = []
        self.tcp: list[socket.socket] = []  # what listens below those of tcp://; the gate closes them
        self._context = context
        self._local: list[bool] = []

    def open(self, endpoint: str, keys: ServerKeys | None = None) -> None:
        """Listens at one more endpoint; over tcp:// with `keys` only to clients that they admit. Raises
        `zmq.ZMQError`."""
        router = self._context.socket(zmq.ROUTER)
        self.sockets.append(router)
        frames_io.bound(router)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.LINGER, FLUSH_MS)
        local = endpoint.startswith("ipc://")
        self._local.append(local)
        if local:
            # The modes of socket and directory say the same; they may be changed from outside.
            router.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        else:
            frames_io.over_tcp(router, parse_endpoint(endpoint).host)
            if keys is not None:
                keys.apply(router)
            router.setsockopt(zmq.BACKLOG, BACKLOG)
        with private_umask():
            if local:
                router.bind(endpoint)
            else:
                self.tcp.append(_bound_tcp(router, endpoint))

    def is_local(self, identity: bytes) -> bool:
        return self._local[identity[0]]

    def receive(self, router: frames_io.Socket) -> list[Buffer] | None:
        """The next message of one of `sockets`, the identity first; None if there is none."""
        frames = frames_io.receive(router, _HEAD_FRAMES)
        if frames:
            frames[0] = bytes((self.sockets.index(router),)) + bytes(frames[0])
        return frames

    def send(self, identity: bytes, frames: Sequence[Any]) -> None:
        """See `frames_io.send`."""
        frames_io.send(self.sockets[identity[0]], [identity[1:], *frames])

    def close(self) -> None:
        for router in self.sockets:
            router.close(FLUSH_MS)


def _bound_tcp(router: frames_io.Socket, endpoint: str) -> socket.socket:
    """Binds; another descriptor of the socket that ZMQ listens with. ZMQ names its own in one event only."""
    monitor = router.get_monitor_socket(zmq.EVENT_LISTENING)
    try:
        router.bind(endpoint)
        return socket.socket(fileno=os.dup(recv_monitor_message(monitor)["value"]))
    finally:
        router.disable_monitor()
        monitor.close(0)
