"""Who may still write into the arena, by locks of the kernel on its file.

A lock belongs to an open file description, which lives as long as any descriptor or mapping of it. The server and the
processes that it starts share one description, with an exclusive flock: where another server gets that lock, all of
them have ended. Each client session gets a description of its own with a read lock on one byte, `writer`: while that
byte is locked, the client may still write what it reserved. No process id is involved, so containers do not matter.

See fcntl(2), "Open file description locks", and flock(2).
"""

from __future__ import annotations

import fcntl
import os
import struct

# type, whence, start, length, pid; the pad is that of the C structure.
_LOCK = struct.Struct("hhqqi4x")
_SESSION_BITS = 32


def own_description(fd: int) -> int:
    """Return a descriptor, owned by the caller, of an open file description of its own. Raises `OSError`, also where
    there is no /proc."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def lock_for_server(fd: int) -> bool:
    """Take the server's lock, for this description; False while another server or one of its processes lives."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def writer_of(generation: int, session: int) -> int:
    """Return the number of a session as a writer, unique among the servers that had this arena."""
    return generation << _SESSION_BITS | session


def description_for(fd: int, writer: int) -> int:
    """Return a descriptor of the arena for a client, owned by the caller: while it, or a mapping of it, exists,
    `may_write` is true. Raises `OSError`."""
    own = own_description(fd)
    try:
        _lock(own, fcntl.F_OFD_SETLK, fcntl.F_RDLCK, writer)
    except BaseException:
        os.close(own)
        raise
    return own


def may_write(fd: int, writer: int) -> bool:
    """Whether a client with this number may still write. `fd` is of another description. Raises `OSError`."""
    kind, *_ = _LOCK.unpack(_lock(fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, writer))
    return bool(kind != fcntl.F_UNLCK)


def _lock(fd: int, command: int, kind: int, byte: int) -> bytes:
    return fcntl.fcntl(fd, command, _LOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
