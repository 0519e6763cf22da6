"""The client half of the liveness socket: it brings the arena's descriptor, and its end means the server's death.

Runs in the engine process; connected by the supervisor thread, watched by the connection's I/O thread.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import threading

from kvframework.config import trusted_server_uid
from kvframework.errors import EndpointError, ProtocolError, ServerGone
from kvframework.messaging.fork import close_after_fork
from kvframework.messaging.liveness_answer import WITH_ARENA, WITHOUT_ARENA, peer_uid


class LivenessLink:
    """A connected liveness socket. Poll `fd` for reading: it becomes readable only at the server's end.

    A forked child closes its copy by itself, so the server sees the end of the process that connected.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        # Between the closing of a descriptor and a copy of it, its number may become another file's.
        self._lock = threading.Lock()
        close_after_fork(self)

    @classmethod
    def connect(cls, path: str, token: bytes, timeout: float) -> tuple[LivenessLink, int | None]:
        """Connect, present the token and receive the arena's descriptor (None if there is no arena). The caller owns
        both. Blocks at most about `timeout` seconds. Raises `ServerGone`, `ProtocolError` or `EndpointError`."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link = cls(sock)  # before connecting, so that a fork in between keeps no copy
        try:
            sock.settimeout(timeout)
            sock.connect(path)
            if peer_uid(sock) != trusted_server_uid():
                raise EndpointError(f"the server runs as another user, uid {peer_uid(sock)}", where=path)
            sock.sendall(token)
            arena_fd = _receive_arena(sock, path)
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            raise ServerGone(f"no liveness socket: {error}", where=path) from None
        except Exception:
            sock.close()
            raise
        return link, arena_fd

    @property
    def fd(self) -> int:
        return self._sock.fileno()

    def duplicate(self) -> int:
        """Return another descriptor of the same socket, owned by the caller: the server sees the end when all are
        closed. Raises `ServerGone` once the socket is closed, and `OSError`."""
        with self._lock:
            if self._sock.fileno() < 0:
                raise ServerGone("the server has ended")
            return os.dup(self._sock.fileno())

    def close(self) -> None:
        """Close the socket, which the server takes for the client's death. Idempotent."""
        with self._lock:
            self._sock.close()

    def close_in_child(self) -> None:
        self._sock.close()


def _receive_arena(sock: socket.socket, path: str) -> int | None:
    # Not socket.recv_fds: before Python 3.12 it loses the flags, and with them close-on-exec.
    space = socket.CMSG_SPACE(struct.calcsize("i"))
    data, ancillary, _, _ = sock.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    if not data:
        raise ServerGone("the server refused the liveness socket", where=path)
    if (data, len(fds)) == (WITH_ARENA, 1):
        return fds[0]
    for fd in fds:
        os.close(fd)
    if data == WITHOUT_ARENA:
        return None
    raise ProtocolError(
        "the liveness socket delivered no descriptor", where=path, hint="is the limit of open files reached?"
    )
