"""Owns one attempt to reach a server: a fresh DEALER and HELLO. Runs in the connection's supervisor thread, blocking.

Every attempt has a socket of its own that never reconnects, so that nothing meant for one server reaches another.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import zmq

from kvframework.config import Endpoint, parse_endpoint
from kvframework.errors import ProtocolError, ServerGone, VersionMismatch
from kvframework.messaging import frames_io
from kvframework.messaging.curve import LoadedKeys
from kvframework.messaging.endpoint import ipc_path
from kvframework.wire.frames import ERROR_TYPE, ErrorPayload, decode, error_from, join, split
from kvframework.wire.messages import Hello, HelloReply

_HELLO_ID = 0
_POLL_S = 0.05


# The I/O threads of a client's context, as bit masks: big frames never delay small ones, even while they are encrypted.
CONTROL, BULK = 0b01, 0b10
IO_THREADS = 2


def dial(
    context: zmq.Context[Any],
    endpoint: str,
    hello: Hello,
    *,
    timeout: float,
    closing: Callable[[], bool],
    keys: LoadedKeys | None = None,
    io_thread: int = CONTROL,
) -> tuple[frames_io.Socket, HelloReply]:
    """A connected DEALER, which the caller owns, and HELLO's answer. `context` has `IO_THREADS`.

    Raises `ServerGone` if nobody listens or answers in time, or `closing()`; else what the server refuses with.
    """
    address = None
    if endpoint.startswith("ipc://"):
        _probe(socket.AF_UNIX, ipc_path(endpoint), endpoint, 0.0)
    else:
        address = parse_endpoint(endpoint)
        _probe_tcp(address, endpoint, timeout)
    dealer = context.socket(zmq.DEALER)
    try:
        frames_io.bound(dealer)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.setsockopt(zmq.AFFINITY, io_thread)
        if address is not None:
            frames_io.over_tcp(dealer, address.host)
            if keys is not None:
                keys.apply(dealer)
        dealer.connect(endpoint)
        frames_io.send(dealer, join(_HELLO_ID, "HELLO", hello))
        deadline = time.monotonic() + timeout
        while not dealer.poll(int(_POLL_S * 1000)):
            if closing() or time.monotonic() >= deadline:
                raise ServerGone(f"no answer to HELLO within {timeout} s", where=endpoint, hint=_hint(address, keys))
        return dealer, _check(dealer, hello)
    except zmq.ZMQError as error:
        dealer.close(0)
        raise ServerGone(f"cannot connect: {error}", where=endpoint) from None
    except BaseException:
        dealer.close(0)
        raise


def _hint(address: Endpoint | None, keys: LoadedKeys | None) -> str:
    if address is None:
        return ""
    if keys is None:
        return "a server with CURVE keys answers nobody without them: see `kvframework keys new --help`"
    return "is it this server's public key, and is this client's public key among those that the server admits?"


def _probe_tcp(address: Endpoint, endpoint: str, timeout: float) -> None:
    try:
        family, _, _, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ServerGone(f"there is no such host: {error.strerror}", where=endpoint) from None
    _probe(family, place, endpoint, timeout)


def _probe(family: socket.AddressFamily, place: Any, endpoint: str, timeout: float) -> None:
    """Raises `ServerGone` if nobody listens: ZMQ would only say nothing."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(timeout)
        try:
            probe.connect(place)
        except OSError as error:
            raise ServerGone(f"nobody serves: {error.strerror or error}", where=endpoint) from None


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
