"""The sockets of a server: one ROUTER per endpoint, and identities that distinguish all peers;
the files of an `ipc://` endpoint.

An identity is one byte for the endpoint, then ZMQ's routing id. Serving thread only, after `open`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import zmq

from kvframework.api.plugin import Buffer, Message
from kvframework.config import (
    FULL_SUFFIX,
    LIVENESS_SUFFIX,
    check_directory,
    ipc_path,
    parse_endpoint,
    prepare_private_directory,
)
from kvframework.errors import EndpointError, HelloRequired
from kvframework.messaging import frames_io
from kvframework.messaging.curve import ServerKeys
from kvframework.messaging.polling import close_after_fork
from kvframework.wire.frames import ERROR_TYPE, NO_ANSWER, ErrorPayload, error_payload, join

# The files of an `ipc://` endpoint: its socket, its liveness socket, and the lock that reserves it for one server.
#
# Runs in the server process. An flock decides which process holds the endpoint; no crash can leave it behind.

LOCK_SUFFIX = ".lock"
_CONNECT_S = 1.0


@contextlib.contextmanager
def socket_umask(shared: bool = False) -> Iterator[None]:
    """Files and sockets made within the block are for their owner only, or, if `shared`, for whom their directory and
    the server let in (of the whole process, so keep it short)."""
    before = os.umask(0o111 if shared else 0o177)
    try:
        yield
    finally:
        os.umask(before)


class EndpointFiles:
    """The files of one endpoint while this process holds it; `release()` removes them. `shared`: other users may reach
    the sockets, and the server decides whom it serves."""

    def __init__(self, endpoint: str, *, shared: bool = False) -> None:
        self.endpoint = endpoint
        self.shared = shared
        self.path = ipc_path(endpoint)
        self.liveness = self.path + LIVENESS_SUFFIX
        self._full = self.path + FULL_SUFFIX
        self._lock_path = self.path + LOCK_SUFFIX
        self._lock = -1

    def check(self) -> None:
        """Refuse what `acquire` would refuse, and change nothing. A server that starts at this moment is not seen.
        Blocks for a second at most. Raises `EndpointError`."""
        check_directory(Path(self.path).parent, shared=self.shared)
        for path in (self.path, self.liveness, self._full):
            if os.path.lexists(path):
                self._check_socket(path)
        if any(_listens(path) for path in (self.path, self._full)):
            holder = ""
            with contextlib.suppress(OSError), open(self._lock_path, encoding="ascii", errors="replace") as lock:
                holder = lock.read(32)
            raise self._held(holder)

    def acquire(self) -> None:
        """Make the directory if it is absent, take the lock and remove stale sockets. Raises `EndpointError`, also for
        a directory that others may write to; the error names another process that holds the endpoint."""
        prepare_private_directory(Path(self.path).parent, shared=self.shared)
        try:
            self._lock = self._take_lock()
            for path in (self.path, self.liveness, self._full):
                self._remove_stale(path)
        except OSError as error:
            self._release_lock()
            raise EndpointError(f"{error.strerror}: {error.filename}", where=self.endpoint) from error
        except EndpointError:
            self._release_lock()
            raise
        close_after_fork(self)

    def show(self, shown: bool) -> None:
        """Make the socket visible to clients or hide it. Raises `OSError`."""
        os.rename(*((self._full, self.path) if shown else (self.path, self._full)))

    def release(self) -> None:
        """Remove the files, if this process held the endpoint, and release the lock. Idempotent."""
        if self._lock < 0:
            return
        for path in (self.path, self.liveness, self._full):
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._release_lock()

    def close_in_child(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take_lock(self) -> int:
        while True:
            with socket_umask():
                lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(lock, 32, 0).decode("ascii", "replace")
                os.close(lock)
                raise self._held(holder) from None
            if _is_same_file(lock, self._lock_path):
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
                return lock
            os.close(lock)  # the holder removed the file after it was opened here

    def _release_lock(self) -> None:
        if self._lock < 0:
            return
        with contextlib.suppress(OSError):
            os.unlink(self._lock_path)
        os.close(self._lock)
        self._lock = -1

    def _held(self, holder: str) -> EndpointError:
        return EndpointError(
            f"another server holds this endpoint, process {holder.strip() or 'unknown'}",
            where=self.endpoint,
            hint="stop it, or give this server another endpoint",
        )

    def _check_socket(self, path: str) -> None:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise EndpointError(f"{path} exists and is no socket", where=self.endpoint, hint="choose another path")

    def _remove_stale(self, path: str) -> None:
        try:
            self._check_socket(path)
            os.unlink(path)
        except FileNotFoundError:
            return


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def _is_same_file(fd: int, path: str) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)


logger = logging.getLogger(__name__)

FLUSH_MS = 200
_HEAD_FRAMES = 1 + frames_io.HEAD_FRAMES


class Listeners:
    """The ROUTERs of one server. Borrows the context; `close` before its end. Over ipc:// processes of this user and
    of `admit_uids` are served."""

    def __init__(self, context: zmq.Context[Any], admit_uids: Collection[int] = ()) -> None:
        self._admit_uids = admit_uids
        self.sockets: list[frames_io.Socket] = []
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
            router.bind(endpoint)

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
