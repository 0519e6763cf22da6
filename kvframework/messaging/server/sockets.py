"""The sockets of a server: one ROUTER per endpoint, and identities that distinguish all peers.

An identity is one byte for the endpoint, then ZMQ's routing id. Serving thread only, after `open`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Collection, Sequence
from typing import Any

import zmq

from kvframework.api.types import Buffer, Message
from kvframework.config import parse_endpoint
from kvframework.errors import HelloRequired
from kvframework.messaging import frames_io
from kvframework.messaging.curve import ServerKeys
from kvframework.messaging.server.endpoint_files import socket_umask
from kvframework.wire.frames import ERROR_TYPE, NO_ANSWER, ErrorPayload, error_payload, join

logger = logging.getLogger(__name__)

FLUSH_MS = 200
# Connections that ZMQ has not accepted yet: this many still come in after the gate has shut.
BACKLOG = 128
_HEAD_FRAMES = 1 + frames_io.HEAD_FRAMES


class Listeners:
    """The ROUTERs of one server. Borrows the context; `close` before its end. Over ipc:// processes of this user and
    of `admit_uids` are served."""

    def __init__(self, context: zmq.Context[Any], admit_uids: Collection[int] = ()) -> None:
        self._admit_uids = admit_uids
        self.sockets: list[frames_io.Socket] = []
        self.tcp: list[socket.socket] = []  # the listening sockets below those of tcp://; the gate closes them
        self._context = context
        self._local: list[bool] = []

    def open(self, endpoint: str, keys: ServerKeys | None = None) -> None:
        """Listen at one more endpoint; over tcp:// with `keys` only to clients that they admit. Raises
        `zmq.ZMQError`."""
        router = self._context.socket(zmq.ROUTER)
        self.sockets.append(router)
        frames_io.bound(router)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.LINGER, FLUSH_MS)
        local = endpoint.startswith("ipc://")
        self._local.append(local)
        if local:
            # The modes of socket and directory have the same effect, but may be changed from outside.
            for uid in {os.geteuid(), *self._admit_uids}:
                router.setsockopt(zmq.IPC_FILTER_UID, uid)
        else:
            frames_io.over_tcp(router, parse_endpoint(endpoint).host)
            if keys is not None:
                keys.apply(router)
        with socket_umask(shared=local and bool(self._admit_uids)):
            if local:
                router.bind(endpoint)
            else:
                self.tcp.append(bound_tcp(router, endpoint))

    def is_local(self, identity: bytes) -> bool:
        return self._local[identity[0]]

    def receive(self, router: frames_io.Socket) -> list[Buffer] | None:
        """Return the next message of one of `sockets`, the identity first; None if there is none."""
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


def bound_tcp(router: frames_io.Socket, endpoint: str) -> socket.socket:
    """Bind to a tcp:// endpoint, and return another descriptor of the socket on which ZMQ listens. ZMQ names its own in
    one event only."""
    from zmq.utils.monitor import recv_monitor_message  # imports asyncio, which only this needs

    router.setsockopt(zmq.BACKLOG, BACKLOG)
    monitor = router.get_monitor_socket(zmq.EVENT_LISTENING)
    try:
        router.bind(endpoint)
        return socket.socket(fileno=os.dup(recv_monitor_message(monitor)["value"]))
    finally:
        router.disable_monitor()
        monitor.close(0)


class ReplySender:
    """Sends to identities. Borrows the listeners."""

    def __init__(self, listeners: Listeners, counters: dict[str, int]) -> None:
        self._listeners = listeners
        self._counters = counters

    def send(
        self, identity: bytes, request_id: int, type_name: str, payload: Message, buffers: Sequence[Buffer] = ()
    ) -> bool:
        """Send a reply, unless the request wants none. False if the peer has left or does not read. Raises if the
        message cannot be encoded; nothing is sent then."""
        if request_id == NO_ANSWER:
            return True
        frames = frames_io.outgoing(join(request_id, type_name, payload, buffers))
        try:
            self._listeners.send(identity, frames)
        except zmq.Again:
            self._counters["dropped"] += 1
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                logger.error("cannot send a reply: %s", error)
            self._counters["unroutable"] += 1
            return False
        self._counters["responses"] += 1
        return True

    def send_farewell(self, identity: bytes, request_id: int, error: HelloRequired) -> None:
        """Ask a peer whose session has ended to say HELLO again; most such peers have just left. Not counted, never
        raises."""
        if request_id == NO_ANSWER:
            return
        frames = frames_io.outgoing(join(request_id, ERROR_TYPE, error_payload(error), ()))
        with contextlib.suppress(zmq.ZMQError):
            self._listeners.send(identity, frames)

    def send_error(self, identity: bytes, request_id: int, error: BaseException) -> bool:
        """Send `error` to the peer; never raises."""
        payload = error_payload(error)
        self._counters["errors"] += 1
        self._counters[f"errors.{payload.code}"] += 1
        try:
            return self.send(identity, request_id, ERROR_TYPE, payload)
        except Exception:  # an error text that cannot be encoded, or is far too long
            logger.exception("an error frame cannot be sent as it is")
            return self.send(identity, request_id, ERROR_TYPE, ErrorPayload(payload.code, "see the server's log"))
