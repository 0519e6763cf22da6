"""Owns one attempt to reach a server: a fresh DEALER and HELLO. Runs in the connection's supervisor thread, blocking.

Every attempt has a socket of its own that never reconnects, so that nothing meant for one server reaches another.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import zmq

from kvframework.errors import ProtocolError, ServerGone, VersionMismatch
from kvframework.messaging import frames_io
from kvframework.messaging.endpoint import ipc_path
from kvframework.wire.frames import ERROR_TYPE, ErrorPayload, decode, error_from, join, split
from kvframework.wire.messages import Hello, HelloReply

_HELLO_ID = 0
_POLL_S = 0.05


def dial(
    context: zmq.Context[Any], endpoint: str, hello: Hello, *, timeout: float, closing: Callable[[], bool]
) -> tuple[frames_io.Socket, HelloReply]:
    """A connected DEALER, which the caller owns, and HELLO's answer.

    Raises `ServerGone` if nobody listens or answers in time, or `closing()`; else what the server refuses with.
    """
    if endpoint.startswith("ipc://"):
        _probe(endpoint)
    dealer = context.socket(zmq.DEALER)
    try:
        frames_io.bound(dealer)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.connect(endpoint)
        frames_io.send(dealer, join(_HELLO_ID, "HELLO", hello))
        deadline = time.monotonic() + timeout
        while not dealer.poll(int(_POLL_S * 1000)):
            if closing() or time.monotonic() >= deadline:
                raise ServerGone(f"no answer to HELLO within {timeout} s", where=endpoint)
        return dealer, _check(dealer, hello)
    except zmq.ZMQError as error:
        dealer.close(0)
        raise ServerGone(f"cannot connect: {error}", where=endpoint) from None
    except BaseException:
        dealer.close(0)
        raise


def _probe(endpoint: str) -> None:
    """Raises `ServerGone` at once if nobody listens: ZMQ would only say nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(ipc_path(endpoint))
        except OSError as error:
            raise ServerGone(f"nobody serves: {error.strerror}", where=endpoint) from None


def _check(dealer: frames_io.Socket, hello: Hello) -> HelloReply:
    envelope = split(frames_io.receive(dealer, frames_io.HEAD_FRAMES) or [])
    if envelope.type == ERROR_TYPE:
        raise error_from(decode(envelope.payload, ErrorPayload, where="HELLO"))
    if (envelope.request_id, envelope.type) != (_HELLO_ID, "HELLO"):
        raise ProtocolError(f"the server answered HELLO with {envelope.type!r}")
    reply = decode(envelope.payload, HelloReply, where="HELLO")
    if not hello.min_version <= reply.version <= hello.max_version:
        raise VersionMismatch(
            f"the server chose protocol version {reply.version}",
            available=f"{hello.min_version} to {hello.max_version}",
            hint="install the same kvframework release beside the engine and the server",
        )
    return reply
