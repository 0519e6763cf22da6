"""What a server and its fd store say to each other: the words of systemd, see sd_notify(3) and sd_listen_fds(3), which
`kvframework hold` speaks too. Besides the server's side of them, and how both free the memory of what is kept."""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Collection, Mapping, MutableMapping
from typing import NamedTuple

NOTIFY_VARIABLE = "NOTIFY_SOCKET"
# The descriptors that a started process has from its keeper, from this number on.
FIRST_FD = 3
PID_VARIABLE, COUNT_VARIABLE, NAMES_VARIABLE = "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"
LISTEN_VARIABLES = (PID_VARIABLE, COUNT_VARIABLE, NAMES_VARIABLE, "LISTEN_PIDFDID")
# Names the directory of `kvframework hold`, if that is not the endpoint's, which pods of one node share.
KEEPER_VARIABLE = "KVFRAMEWORK_KEEPER_DIRECTORY"
# When `kvframework hold`, or its pod, began, by the machine's monotonic clock, which all of its containers share.
SINCE_VARIABLE = "KVFRAMEWORK_HOLD_SINCE"
MAX_NOTE_BYTES = 4096
_MAX_NAME = 255
_MAX_LISTENED = 1024


def held_since(environ: Mapping[str, str] = os.environ) -> float:
    """When the `kvframework hold` of this process began, in seconds of the monotonic clock; without one, now."""
    return float(environ.get(SINCE_VARIABLE) or time.monotonic())


class Note(NamedTuple):
    """One message of a server; unknown words are ignored, as systemd ignores them. `name` is "" where none is valid."""

    name: str = ""
    store: bool = False
    remove: bool = False
    ready: bool = False
    stopping: bool = False
    extend_s: float = 0.0


def is_name(text: str) -> bool:
    return 0 < len(text) <= _MAX_NAME and all(" " <= letter <= "~" and letter != ":" for letter in text)


def store_note(name: str) -> bytes:
    """The message with the descriptor to keep, whatever poll(2) says of it. Raises `ValueError` for a bad name."""
    return f"FDSTORE=1\nFDNAME={_checked(name)}\nFDPOLL=0".encode("ascii")


def remove_note(name: str) -> bytes:
    """The message that ends the keeping of all descriptors of the name. Raises `ValueError` as `store_note` does."""
    return f"FDSTOREREMOVE=1\nFDNAME={_checked(name)}".encode("ascii")


def parse_note(payload: bytes) -> Note:
    """The meaning of a message. Never raises: bytes without a meaning are an empty note."""
    words = dict(line.split("=", 1) for line in payload.decode("latin-1").split("\n") if "=" in line)
    name, extend = words.get("FDNAME", ""), words.get("EXTEND_TIMEOUT_USEC", "")
    return Note(
        name=name if is_name(name) else "",
        store=words.get("FDSTORE") == "1",
        remove=words.get("FDSTOREREMOVE") == "1",
        ready=words.get("READY") == "1",
        stopping=words.get("STOPPING") == "1",
        extend_s=int(extend) / 1e6 if extend.isascii() and extend.isdigit() and len(extend) < 18 else 0.0,
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
    found = {PID_VARIABLE: str(pid), COUNT_VARIABLE: str(len(names)), NAMES_VARIABLE: ":".join(names)}
    return found if names else {}


def _checked(name: str) -> str:
    if not is_name(name):
        raise ValueError(f"not a valid name of a descriptor: {name!r}")
    return name


SEND_S = 1


class Keeper:
    """The keeper of this process. Each send blocks for `SEND_S` seconds at most, and raises `OSError` when the keeper
    has ended (`ConnectionRefusedError`, `FileNotFoundError`) or does not read (`BlockingIOError`); a sent message has
    no answer. Thread-safe."""

    lasts = True

    def __init__(self, address: str, found: list[tuple[str, int]]) -> None:
        """`found` are the descriptors from the keeper by name, owned from here on."""
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._found = found
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # The kernel holds as few as 10 messages for a keeper, of all its services.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_S, 0))

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] = os.environ) -> Keeper | None:
        """Return the keeper that started this process, None without one. Once, early in the process and before it
        starts others: it takes the keeper's variables out of `environ`, and no child inherits the descriptors.
        Descriptors without a keeper are closed. Raises `OSError` when there are no descriptors left."""
        variables = {name: environ.pop(name) for name in LISTEN_VARIABLES if name in environ}
        address = environ.pop(NOTIFY_VARIABLE, "")
        found = []
        for fd, name in enumerate(listened_names(variables, os.getpid()), FIRST_FD):
            with contextlib.suppress(OSError):  # no such descriptor
                fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
                found.append((name, fd))
        if address[:1] in ("/", "@") and address[1:]:
            return cls(address, found)
        for _, fd in found:
            os.close(fd)
        return None

    def has(self, name: str) -> bool:
        """Whether `kept` has yet to return a descriptor of this name."""
        return any(name == each for each, _ in self._found)

    def nbytes(self, name: str) -> int:
        """Return the size of the file of this name that `kept` has yet to return, 0 without one."""
        return next((os.fstat(fd).st_size for each, fd in self._found if each == name), 0)

    def kept(self, names: Collection[str]) -> dict[str, int]:
        """Return what the keeper has had of `names`; the caller owns the descriptors. Any other, and all of a name that
        came more than once, are closed, and the keeper is asked to remove them. Once: empty from the second time on."""
        found, self._found = self._found, []
        counts, kept = Counter(name for name, _ in found), {}
        for name, fd in found:
            if name in names and counts[name] == 1:
                kept[name] = fd
            else:
                os.close(fd)
        for name in counts.keys() - kept.keys() - {""}:
            with contextlib.suppress(OSError):  # the next start finds it again
                self.remove(name)
        return kept

    def store(self, name: str, fd: int) -> None:
        """Have the keeper keep a duplicate of `fd`, which stays the caller's. `kvframework hold` replaces what it has
        under the name, systemd keeps both: remove the name first. Raises `OSError`, and `ValueError` for a name that is
        not printable ASCII without a colon."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
        self._socket.sendmsg([store_note(name)], [rights], 0, self._address)

    def remove(self, name: str) -> None:
        """Have the keeper close what it has under the name: its memory is free some time later. Raises as `store`."""
        self._send(remove_note(name))

    def ready(self) -> None:
        """Tell the keeper that this process serves. Raises `OSError`."""
        self._send(b"READY=1")

    def stopping(self) -> None:
        """Tell the keeper that this process ends by itself: so does `hold`. Raises `OSError`."""
        self._send(b"STOPPING=1")

    def extend(self, seconds: float) -> None:
        """Tell the keeper that the end for which it has asked takes so long."""
        with contextlib.suppress(OSError):
            self._send(b"EXTEND_TIMEOUT_USEC=%d" % (seconds * 1e6))

    def close(self) -> None:
        """Close the socket, and what `kept` has not returned. Idempotent."""
        while self._found:
            os.close(self._found.pop()[1])
        self._socket.close()

    def _send(self, note: bytes) -> None:
        self._socket.sendto(note, self._address)


def free_memory(fd: int) -> None:
    """Free the memory of a file, which also those that map it lose. A file with a name is a stranger's: it stays. So
    does one of reserved huge pages, while a process maps it: an engine in the midst of a copy would end by SIGBUS once
    the next server has taken them. Blocks until it is free."""
    if os.fstat(fd).st_nlink or os.fstatvfs(fd).f_bsize > mmap.PAGESIZE:
        return
    with contextlib.suppress(OSError, ValueError), mmap.mmap(fd, 0) as memory:
        memory.madvise(mmap.MADV_REMOVE)


def free_unused(descriptors: Collection[int]) -> bool:
    """Free the memory of files as `free_memory` does. False, and nothing is freed, while a server uses one of them: it
    has a lock on its arena, see `storage.l1.journal`."""
    files = [fd for fd in descriptors if not os.fstat(fd).st_nlink]
    with contextlib.ExitStack() as stack:
        for fd in files:
            try:
                own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, own)
                fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
        for fd in files:
            free_memory(fd)
    return True
