"""The socket at which `kvframework hold` hears its servers."""

from __future__ import annotations

import array
import os
import socket
import struct
from typing import NamedTuple

from kvframework.keeper.words import MAX_NOTE_BYTES, Note, parse_note

_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid
# Credentials come first, so that no number of descriptors can displace them.
_ANCILLARY_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(array.array("i").itemsize)


class Received(NamedTuple):
    """A message, and who sent it as the kernel says. `fd` belongs to the receiver; None: there was not exactly one, and
    others are closed."""

    pid: int
    uid: int
    note: Note
    fd: int | None


class NoteSocket:
    """A datagram socket at a path of its own, in a directory where others may not write, with mode 0600: the kernel
    refuses the processes of other users before this one sees a byte, which it does not for an abstract name."""

    def __init__(self, path: str) -> None:
        """Bind the socket, in place of one that a killed process left. Raises `OSError`."""
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        # Before it is bound: each message has its sender's credentials.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        bind_private(self._socket, path)

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> Received | None:
        """Return the next message, None if there is none. Never blocks."""
        try:
            payload, ancillary, flags, _ = self._socket.recvmsg(
                MAX_NOTE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        fds, sender = array.array("i"), (0, 0, 0)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) >= _CREDENTIALS.size:
                sender = _CREDENTIALS.unpack_from(data)
        whole = not flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC)
        if whole and len(fds) == 1:
            return Received(sender[0], sender[1], parse_note(payload), fds[0])
        for fd in fds:
            os.close(fd)
        return Received(sender[0], sender[1], parse_note(payload) if whole else Note(), None)

    def close(self) -> None:
        """Close the socket and remove its path."""
        self._socket.close()
        remove_socket(self.path)


def bind_private(bound: socket.socket, path: str) -> None:
    """Bind a socket to a path that only this user may use, in place of an earlier one. Raises `OSError`."""
    remove_socket(path)
    before = os.umask(0o177)
    try:
        bound.bind(path)
    finally:
        os.umask(before)


def remove_socket(path: str) -> None:
    """Remove the path of a socket, if there is one."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
