"""Reading of one object's file into the caller's buffers. Runs in the caller's storage thread."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence

from kvf_filesystem.aligned import align
from kvf_filesystem.form import HEAD_BYTES, LARGE, place_of, start_in, value_bytes
from kvf_filesystem.moving import move, trimmed
from kvf_filesystem.root import Root
from kvframework.api.tier import Outcome, PackedKey

# O_NONBLOCK: opening a FIFO in place of a file would block.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_FILE = (errno.ELOOP, errno.ENXIO)  # a symbolic link, a socket


def look(root: Root, key: PackedKey) -> Outcome:
    """FOUND, MISSING, or DAMAGED if the path is not a file. Raises `OSError`."""
    folder, name = place_of(key)
    try:
        found = os.stat(name, dir_fd=root.folders.at(folder), follow_symlinks=False)
    except FileNotFoundError:
        return Outcome.MISSING
    return Outcome.FOUND if stat.S_ISREG(found.st_mode) else Outcome.DAMAGED


def load(root: Root, key: PackedKey, parts: Sequence[memoryview], check: Callable[[], None]) -> int | Outcome:
    """Fills `parts` (of bytes, none empty) with the value: its bytes, or MISSING, FAILED or DAMAGED.

    Raises `OSError` for errors that do not concern this file alone, and the errors of `check`.
    """
    folder, name = place_of(key)
    try:
        fd = os.open(name, _FLAGS, dir_fd=root.folders.at(folder))
    except FileNotFoundError:
        return Outcome.MISSING
    except OSError as error:
        if error.errno in _NO_FILE:
            return Outcome.DAMAGED
        if root.spared_by(error, folder):
            return Outcome.FAILED
        raise
    try:
        found = os.fstat(fd)
        nbytes = value_bytes(found.st_size) if stat.S_ISREG(found.st_mode) else None
        if nbytes is None or nbytes > sum(part.nbytes for part in parts):
            return Outcome.DAMAGED
        whole = _read(fd, trimmed(parts, nbytes), nbytes, root.direct_reads, check)
        return nbytes if whole else Outcome.DAMAGED
    finally:
        os.close(fd)


def _read(fd: int, parts: Sequence[memoryview], nbytes: int, direct: bool, check: Callable[[], None]) -> bool:
    """False if the file is not as it was written."""
    head = bytearray(HEAD_BYTES)
    if nbytes < LARGE:
        whole = HEAD_BYTES + nbytes
        moved = move(os.preadv, fd, [memoryview(head), *parts], check, enough=whole)
        return moved == whole and start_in(bytes(head), nbytes) == HEAD_BYTES
    aligned = align(parts, nbytes) if direct else None
    if aligned is not None and aligned.read(fd, check):
        return True
    # A read of its own, also because it makes the kernel read ahead: without it the first large read waits for the
    # disk.
    if os.preadv(fd, [head], 0) != HEAD_BYTES:
        return False
    start = start_in(bytes(head), nbytes)
    return start is not None and move(os.preadv, fd, parts, check, offset=start, enough=nbytes) == nbytes
