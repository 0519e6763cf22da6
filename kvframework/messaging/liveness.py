"""Owns the server half of the liveness socket: it passes the arena's descriptor, and its end is the client's death.

A client connects, sends its 16-byte session token and gets one byte, with the arena's descriptor if there is one. After
that nobody sends anything. Driven by the serving loop through one pollable descriptor (`fileno`); nothing here blocks.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from kvframework.messaging.endpoint import private_umask
from kvframework.messaging.fork import close_after_fork
from kvframework.messaging.session import TOKEN_BYTES, ClientSession

logger = logging.getLogger(__name__)

WITH_ARENA = b"\x01"
WITHOUT_ARENA = b"\x00"
MAX_HALF_OPEN = 256
MAX_PER_SESSION = 4
HALF_OPEN_S = 1.0
# Of a whole node's clients that come at once, as after a restart: whom the kernel cannot queue is refused.
BACKLOG = 1024
_EVENTS_PER_ROUND = 64
_ACCEPTS_PER_ROUND = 16


def peer_uid(sock: socket.socket) -> int:
    """The user id of the process at the other end of a Unix socket."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid


@dataclass
class _HalfOpen:
    """A connection that has not sent its whole token yet."""

    sock: socket.socket
    deadline: float
    received: bytearray = field(default_factory=bytearray)


class LivenessServer:
    """Listens at `path`. `find` tells the session of a token; sessions become `local` when their socket is admitted."""

    def __init__(
        self,
        path: str,
        *,
        arena_fd: int | None,
        find: Callable[[bytes], ClientSession | None],
        clock: Callable[[], float],
        counters: dict[str, int],
    ) -> None:
        self._arena_fd = arena_fd
        self._find = find
        self._clock = clock
        self._counters = counters
        self._half_open: dict[int, _HalfOpen] = {}
        self._live: dict[int, tuple[socket.socket, ClientSession]] = {}
        self._listening = False
        self._epoll = select.epoll()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        close_after_fork(self)
        try:
            self._listener.setblocking(False)
            with private_umask():
                self._listener.bind(path)
            self._listener.listen(BACKLOG)
        except OSError:
            self.close()
            raise
        self._listen()

    def fileno(self) -> int:
        """Readable whenever `serve()` has something to do."""
        return self._epoll.fileno()

    def serve(self) -> list[ClientSession]:
        """Handles what is ready, a bounded amount. Returns the sessions whose last liveness socket has ended."""
        dead = []
        calling = False
        for fd, _ in self._epoll.poll(0, _EVENTS_PER_ROUND):
            if fd == self._listener.fileno():
                calling = True
            elif fd in self._half_open:
                self._hear(self._half_open[fd])
            elif fd in self._live:
                sock, session = self._live.pop(fd)
                self._hang_up(sock)
                if not any(other is session for _, other in self._live.values()):
                    session.local = False
                    dead.append(session)
        # After those who have said something: the ones who have not may have to make room.
        for _ in range(_ACCEPTS_PER_ROUND if calling else 0):
            if not self._accept():
                break
        return dead

    def expire(self, now: float) -> None:
        """Drops connections that did not send their token in time, and listens again after descriptors ran out."""
        for entry in [entry for entry in self._half_open.values() if now >= entry.deadline]:
            self._refuse(entry)
        if not self._listening:
            self._listen()

    def drop(self, session: ClientSession) -> None:
        """Closes the sockets of a session that has ended; its client sees that at once."""
        for fd in [fd for fd, (_, other) in self._live.items() if other is session]:
            self._hang_up(self._live.pop(fd)[0])

    def close(self) -> None:
        """Closes every socket; the clients take it for the server's death. The socket file is the caller's."""
        for sock, _ in self._live.values():
            sock.close()
        for entry in self._half_open.values():
            entry.sock.close()
        self._live.clear()
        self._half_open.clear()
        self._listener.close()
        self._epoll.close()

    def close_in_child(self) -> None:
        self.close()

    def _listen(self) -> None:
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._listening = True

    def _accept(self) -> bool:
        """False if nobody calls."""
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                # The listener would stay readable and turn the loop into a busy one: rest until the next tick.
                logger.warning("cannot accept a liveness connection: %s", error)
                self._epoll.unregister(self._listener.fileno())
                self._listening = False
            return False
        if peer_uid(sock) != os.geteuid():
            logger.warning("refused a liveness connection of another user, uid %d", peer_uid(sock))
            self._counters["liveness_refused"] += 1
            sock.close()
            return True
        if len(self._half_open) >= MAX_HALF_OPEN:
            self._refuse(next(iter(self._half_open.values())))
        sock.setblocking(False)
        self._half_open[sock.fileno()] = _HalfOpen(sock, self._clock() + HALF_OPEN_S)
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        return True

    def _hear(self, entry: _HalfOpen) -> None:
        try:
            data = entry.sock.recv(TOKEN_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        entry.received += data
        if data and len(entry.received) < TOKEN_BYTES:
            return
        session = self._find(bytes(entry.received))
        if session is None or sum(other is session for _, other in self._live.values()) >= MAX_PER_SESSION:
            self._refuse(entry)
            return
        fd, was_local = entry.sock.fileno(), session.local
        session.local = True  # before the client is told
        session.liveness = entry.sock
        if not self._admit(entry.sock):
            session.local = was_local
            session.liveness = None
            self._refuse(entry)
            return
        del self._half_open[fd]
        self._live[fd] = (entry.sock, session)

    def _admit(self, sock: socket.socket) -> bool:
        try:
            if self._arena_fd is None:
                return sock.send(WITHOUT_ARENA) == 1
            return socket.send_fds(sock, [WITH_ARENA], [self._arena_fd]) == 1
        except OSError as error:
            logger.warning("cannot answer on a liveness socket: %s", error)
            return False

    def _refuse(self, entry: _HalfOpen) -> None:
        self._counters["liveness_refused"] += 1
        self._half_open.pop(entry.sock.fileno(), None)
        self._hang_up(entry.sock)

    def _hang_up(self, sock: socket.socket) -> None:
        # A copier may hold a copy (`ClientSession.hold`): the closed socket would still be watched, and what it says
        # taken for the words of the connection that gets its number next.
        with contextlib.suppress(OSError):
            self._epoll.unregister(sock)
        sock.close()
