"""One attempt to reach a server: a fresh DEALER and HELLO; and the second socket of a session, for bulk. Runs in the
connection's supervisor thread, blocking.

Every attempt has its own socket, which never reconnects, so that no message for one server reaches another.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from kvframework.api.futures import Future
from kvframework.api.requests import Buffer, Message, RequestSpec
from kvframework.config import (
    FULL_SUFFIX,
    Endpoint,
    check_private_directory,
    ipc_path,
    parse_endpoint,
    trusted_server_uid,
)
from kvframework.errors import KVFrameworkError, OutOfResources, ProtocolError, ServerFull, ServerGone, VersionMismatch
from kvframework.messaging import frames_io
from kvframework.messaging.client.link import Answer, Link
from kvframework.messaging.client.liveness import Heartbeat
from kvframework.messaging.curve import LoadedKeys
from kvframework.messaging.polling import FOR_A_CONNECTION, as_out_of_resources, need
from kvframework.wire.frames import ERROR_TYPE, Envelope, ErrorPayload, decode, error_from, join, split
from kvframework.wire.messages import Goodbye, Hello, HelloReply

_HELLO_ID, _GOODBYE_ID = 0, 1
_GOODBYE_MS = 200
_POLL_S = 0.05


# The I/O threads of a client's context, as bit masks: big frames never delay small ones, even while they are encrypted.
CONTROL, BULK = 0b01, 0b10
IO_THREADS = 2
# Twice the need of a context with its first connection, see `FOR_A_CONNECTION`.
_FOR_A_CONTEXT = {"descriptors": 2 * FOR_A_CONNECTION, "threads": 4}


def make_context() -> zmq.Context[Any]:
    """Return a context whose threads run. Raises `OutOfResources` and `zmq.ZMQError`; ZMQ ends the process if it lacks
    descriptors or threads while it starts, so a surplus is required."""
    need(**_FOR_A_CONTEXT)
    context = zmq.Context(IO_THREADS)
    try:
        context.socket(zmq.DEALER).close(0)
    except zmq.ZMQError:
        context.destroy(0)
        raise
    return context


def dial(
    context: zmq.Context[Any],
    endpoint: str,
    hello: Hello,
    *,
    timeout: float,
    closing: Callable[[], bool],
    keys: LoadedKeys | None = None,
    io_thread: int = CONTROL,
    waiting: Callable[[ServerGone], None] = lambda _: None,
) -> tuple[frames_io.Socket, HelloReply]:
    """Return a connected DEALER, which the caller owns, and HELLO's answer. `context` has `IO_THREADS`.

    Raises `ServerGone` without a listener, without an answer in time, or on `closing()`; `EndpointError` for an ipc://
    endpoint in a directory that others may write to; else the server's refusal. `waiting` is called once HELLO has been
    sent, with the error that is raised if no answer comes.
    """
    address = None
    if endpoint.startswith("ipc://"):
        _check_not_full(endpoint)
        _probe(socket.AF_UNIX, ipc_path(endpoint), endpoint, 0.0)
        _check_directory(endpoint)
    else:
        address = parse_endpoint(endpoint)
        _probe_tcp(address, endpoint, timeout)
    unanswered = ServerGone("no answer to HELLO", where=endpoint, hint=_hint(address, keys))
    dealer = context.socket(zmq.DEALER)
    # A process that is killed still accepts connections for a moment: without this, the caller would wait in vain.
    hung_up = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
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
        waiting(unanswered)
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(hung_up, zmq.POLLIN)
        while dealer not in dict(poller.poll(int(_POLL_S * 1000))):
            gone = hung_up.poll(0) and not dealer.poll(0)
            if gone or closing() or time.monotonic() >= deadline:
                raise unanswered
        envelope = _answer(dealer)
        try:
            return dealer, _accepted(envelope, hello)
        except ProtocolError as error:
            _say_why(dealer, error)
            raise
    except zmq.Again:
        # The server hung up before HELLO was sent, as it does with clients that have no keys.
        dealer.close(0)
        raise unanswered from None
    except zmq.ZMQError as error:
        dealer.close(0)
        raise ServerGone(f"cannot connect: {error}", where=endpoint) from None
    except BaseException:
        dealer.close(0)
        raise
    finally:
        if not dealer.closed:
            dealer.disable_monitor()
        hung_up.close(0)


def _hint(address: Endpoint | None, keys: LoadedKeys | None) -> str:
    if address is None:
        return "a process listens there but does not answer: is it stopped or blocked?"
    if keys is None:
        return "a server with CURVE keys does not answer clients without keys: see `kvframework keys new --help`"
    return "check that it is this server's public key, and that the server admits this client's public key"


def _check_directory(endpoint: str) -> None:
    """Check the directory: a user who may write there could replace the socket by that of another server."""
    try:
        check_private_directory(Path(ipc_path(endpoint)).parent, owner=trusted_server_uid())
    except OSError as error:
        raise ServerGone(f"no server listens: {error.strerror}", where=endpoint) from None


def _check_not_full(endpoint: str) -> None:
    path = ipc_path(endpoint)
    if os.path.exists(path + FULL_SUFFIX) and not os.path.exists(path):
        raise ServerFull("the server accepts no client at the moment: its descriptors run low", where=endpoint)


def _probe_tcp(address: Endpoint, endpoint: str, timeout: float) -> None:
    try:
        family, _, _, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ServerGone(f"there is no such host: {error.strerror}", where=endpoint) from None
    _probe(family, place, endpoint, timeout)


def _probe(family: socket.AddressFamily, place: Any, endpoint: str, timeout: float) -> None:
    """Raise `ServerGone` if there is no listener, which ZMQ would not report."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(timeout)
        try:
            probe.connect(place)
        except OSError as error:
            raise ServerGone(f"no server listens: {error.strerror or error}", where=endpoint) from None


def _answer(dealer: frames_io.Socket) -> Envelope:
    envelope = split(frames_io.receive(dealer, frames_io.HEAD_FRAMES) or [])
    if envelope.type == ERROR_TYPE:
        raise error_from(decode(envelope.payload, ErrorPayload, where="HELLO"))
    return envelope


def _say_why(dealer: frames_io.Socket, error: ProtocolError) -> None:
    with contextlib.suppress(zmq.ZMQError):
        frames_io.send(dealer, join(_GOODBYE_ID, "GOODBYE", Goodbye(error.code, error.fact)))
    dealer.close(_GOODBYE_MS)


def _accepted(envelope: Envelope, hello: Hello) -> HelloReply:
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


# The second socket of a session, for bulk: big frames use it, so that no small request waits behind them.
#
# The first thread that needs it opens it, and any failure on it discards it: its requests in flight fail with
# `ServerGone`, and no late frame of it can pass for another answer.

# The control socket monitors whether the server lives; a PING would wait behind the bulk.
_PING_S = 3600.0


class BulkSocket:
    """The bulk socket of the session of the `control` link, which ends with it. Thread-safe.

    `join()` makes a DEALER that has joined the session; it blocks for one handshake.
    """

    def __init__(self, control: Link, join: Callable[[], frames_io.Socket]) -> None:
        self._control = control
        self._join = join
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._closed = False

    def begin(self, spec: RequestSpec, payload: Message, buffers: Sequence[Buffer], timeout: float) -> Future[Answer]:
        """Send a request like `Link.begin`, after a handshake if there is no socket. Never raises."""
        try:
            link = self._opened()
        except KVFrameworkError as error:
            # These errors would refuse a new session too.
            if not isinstance(error, (ServerGone, ServerFull, OutOfResources)):
                self._control.close()  # the session refuses another socket: only a new session can help
            return Future.failed(error.with_traceback(None))
        except Exception as error:
            out = as_out_of_resources(error)
            if out is None:
                raise
            return Future.failed(out)
        return link.begin(spec, payload, buffers, timeout=timeout)

    def close(self) -> None:
        """Close the socket. Idempotent. Waits for a handshake in progress."""
        with self._lock:
            self._closed = True
            if self._link is not None:
                self._link.close()

    def _opened(self) -> Link:
        with self._lock:
            if self._closed or not self._control.alive:
                raise ServerGone("the connection was closed")
            link = self._link
            if link is not None and link.alive and not link.suspect:
                return link
            if link is not None:
                link.close()
            need(descriptors=FOR_A_CONNECTION)
            heartbeat = Heartbeat(_PING_S, _PING_S, time.monotonic())
            dealer = self._join()
            try:
                link = Link(dealer, None, self._control.boot_id, heartbeat, lambda: None)
                link.start()
            except BaseException:
                dealer.close(0)
                raise
            self._link = link
            return link
