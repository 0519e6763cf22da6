"""The sockets of listeners: other programs reach them on the same terms as the server."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection
from typing import TypeVar

import zmq

from kvframework.api.endpoint import parse_endpoint
from kvframework.api.listener import Sockets
from kvframework.errors import EndpointError
from kvframework.messaging import frames_io
from kvframework.messaging.curve import ServerKeys
from kvframework.messaging.server.admission import ZapHandler
from kvframework.messaging.server.sockets import EndpointFiles, socket_umask

T = TypeVar("T")

# An earlier server, which ends, may still listen.
_BIND_S = 5.0
_BIND_STEP_S = 0.05


class ListenerDoors:
    """The doors of the listeners' local sockets, which the server's gate shuts."""

    def __init__(self) -> None:
        self._open = True
        self._lock = threading.Lock()
        self._doors: list[Callable[[bool], None]] = []

    def admit(self, peers: bool) -> None:
        """Let new peers in, or keep them out: each connection is a descriptor, and libzmq ends a process that has none
        left. From any thread. Raises `OSError`."""
        with self._lock, contextlib.ExitStack() as each:  # a door that fails leaves no other as it was
            self._open = peers
            for door in self._doors:
                each.callback(door, peers)

    def add(self, door: Callable[[bool], None]) -> None:
        """Add a door, which is open; it is shut at once while no new peer is let in. Raises `OSError`."""
        with self._lock:
            self._doors.append(door)
            if not self._open:
                door(False)

    def remove(self, door: Callable[[bool], None]) -> None:
        with self._lock:
            self._doors.remove(door)


class ListenerSockets(Sockets):
    """See `Sockets`. Over tcp:// the clients that `keys` admit are let in, all with None."""

    def __init__(self, doors: ListenerDoors, keys: ServerKeys | None, admit_uids: Collection[int]) -> None:
        self._doors = doors
        self._keys = keys
        self._admit_uids = admit_uids
        self._counters = {"curve_refused": 0}
        with contextlib.ExitStack() as undo:
            # Released last: a socket that ends removes whatever lies at its path.
            self._files = undo.enter_context(contextlib.ExitStack())
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            undo.callback(self._context.term)
            self._zap = None if keys is None else ZapHandler(self._context, keys.admitted, self._counters)
            if self._zap is not None:
                undo.callback(self._zap.close)
            self._undo = undo.pop_all()
        self.guard = None if self._zap is None else self._zap.socket

    @property
    def refused(self) -> int:  # type: ignore[override]
        return self._counters["curve_refused"]

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        self._undo.callback(made.close)
        return made

    def bind(self, socket: zmq.Socket[bytes], endpoint: str, *, where: str) -> None:
        parsed = parse_endpoint(endpoint, where=where)
        shared = parsed.kind == "ipc" and bool(self._admit_uids)
        files = None
        if parsed.kind == "tcp":
            frames_io.over_tcp(socket, parsed.host)
            if self._keys is not None:
                self._keys.apply(socket)
        else:
            files = EndpointFiles(endpoint, shared=shared)
            _when_free(files.acquire)
            self._files.callback(files.release)
            for uid in {os.geteuid(), *self._admit_uids}:
                socket.setsockopt(zmq.IPC_FILTER_UID, uid)

        def bind() -> None:
            try:
                with socket_umask(shared=shared):
                    socket.bind(endpoint)
            except zmq.ZMQError as error:
                raise EndpointError(
                    f"it cannot be listened at: {error.strerror}",
                    where=f"{where} = {endpoint}",
                    hint="name an address of this machine that is free",
                ) from None

        _when_free(bind)
        if files is not None:
            self._undo.callback(self._doors.remove, files.show)
            self._doors.add(files.show)

    def serve_guard(self) -> None:
        if self._zap is not None:
            self._zap.serve()

    def close(self) -> None:
        self._undo.close()


def _when_free(take: Callable[[], T]) -> T:
    """Take what an earlier server, which ends, may still have. A mistake is said after as long."""
    until = time.monotonic() + _BIND_S
    while True:
        try:
            return take()
        except EndpointError:
            if time.monotonic() >= until:
                raise
            time.sleep(_BIND_STEP_S)
