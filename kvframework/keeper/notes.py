"""The words between a server and its keeper, those of systemd, see sd_notify(3) and sd_listen_fds(3), and the socket at
which `kvframework hold` hears them."""

from __future__ import annotations

import array
import os
import socket
import struct
from typing import NamedTuple

NOTIFY_VARIABLE = "NOTIFY_SOCKET"
# The descriptors that a started process has from its keeper, from this number on.
FIRST_FD = 3
PID_VARIABLE, COUNT_VARIABLE, NAMES_VARIABLE = "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"
LISTEN_VARIABLES = (PID_VARIABLE, COUNT_VARIABLE, NAMES_VARIABLE, "LISTEN_PIDFDID")
READY = b"READY=1"
STOPPING = b"STOPPING=1"
MAX_NOTE_BYTES = 4096
_MAX_NAME = 255
_MAX_LISTENED = 1024


class Note(NamedTuple):
    """One message of a server; unknown words are ignored, as systemd ignores them. `name` is "" where none is valid."""

    name: str = ""
    store: bool = False
    remove: bool = False
    ready: bool = False
    stopping: bool = False


def is_name(text: str) -> bool:
    """Whether a descriptor can have this name."""
    return 0 < len(text) <= _MAX_NAME and all(" " <= letter <= "~" and letter != ":" for letter in text)


def store_note(name: str) -> bytes:
    """The message with the descriptor to keep. Raises `ValueError` for a name that none can have."""
    # Kept whatever poll(2) says of it.
    return f"FDSTORE=1\nFDNAME={_checked(name)}\nFDPOLL=0".encode("ascii")


def remove_note(name: str) -> bytes:
    """The message that ends the keeping of all descriptors of the name. Raises `ValueError` as `store_note` does."""
    return f"FDSTOREREMOVE=1\nFDNAME={_checked(name)}".encode("ascii")


def parse_note(payload: bytes) -> Note:
    """The meaning of a message. Never raises: bytes without a meaning are an empty note."""
    words = dict(line.split("=", 1) for line in payload.decode("latin-1").split("\n") if "=" in line)
    name = words.get("FDNAME", "")
    return Note(
        name=name if is_name(name) else "",
        store=words.get("FDSTORE") == "1",
        remove=words.get("FDSTOREREMOVE") == "1",
        ready=words.get("READY") == "1",
        stopping=words.get("STOPPING") == "1",
    )


def listened_names(environ: dict[str, str], pid: int) -> list[str]:
    """The names of the descriptors from `FIRST_FD` on, "" for one without a valid name; empty if the variables are
    absent, malformed or meant for another process than `pid`."""
    count = environ.get(COUNT_VARIABLE, "")
    if environ.get(PID_VARIABLE, "") != str(pid) or not (count.isascii() and count.isdigit() and len(count) < 5):
        return []
    number = min(int(count), _MAX_LISTENED)
    names = environ.get(NAMES_VARIABLE, "").split(":")
    if len(names) != number:
        return [""] * number
    return [name if is_name(name) else "" for name in names]


def listen_variables(names: list[str], pid: int) -> dict[str, str]:
    """The variables of a process that has descriptors of these names; none without descriptors."""
    if not names:
        return {}
    return {PID_VARIABLE: str(pid), COUNT_VARIABLE: str(len(names)), NAMES_VARIABLE: ":".join(names)}


def _checked(name: str) -> str:
    if not is_name(name):
        raise ValueError(f"no descriptor can have the name {name!r}")
    return name


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
