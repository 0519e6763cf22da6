"""Moving bytes between a file and the caller's buffers, by direct I/O where that is possible, and reading one object's
file. Runs in the caller's storage thread."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvf_filesystem import form
from kvf_filesystem.root import Root
from kvframework.api.plugin import Buffer
from kvframework.api.tier import Outcome, PackedKey

# A call checks its deadline and `close` between two slices. A multiple of the page size: a slice of aligned views is
# aligned.
SLICE_BYTES = 8 << 20
_SLICE_VIEWS = 1000  # the kernel takes 1024


class Vectored(Protocol):
    """`os.preadv` or `os.pwritev`."""

    def __call__(self, fd: int, buffers: Sequence[Buffer], offset: int, /) -> int: ...


def move(
    operation: Vectored,
    fd: int,
    views: Sequence[memoryview],
    check: Callable[[], None],
    *,
    offset: int = 0,
    enough: int,
) -> int:
    """Read or write `views` (of bytes) one after the other, from `offset` on; return the number of bytes moved.

    Less than `enough` only where the file ends. Raises `OSError`, and the errors of `check`, which is called before
    each slice.
    """
    moved = 0
    for batch in _slices(views):
        check()
        while batch and moved < enough:
            done = operation(fd, batch, offset + moved)
            if done == 0:
                return moved
            moved += done
            batch = _rest(batch, done)
    return moved


def trimmed(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` bytes of the views."""
    kept = []
    for view in views:
        if nbytes <= 0:
            break
        kept.append(view[:nbytes])
        nbytes -= view.nbytes
    return kept


def _slices(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    batch: list[memoryview] = []
    room = SLICE_BYTES
    for view in views:
        while view.nbytes:
            if not room or len(batch) == _SLICE_VIEWS:
                yield batch
                batch, room = [], SLICE_BYTES
            batch.append(view[:room])
            room -= batch[-1].nbytes
            view = view[batch[-1].nbytes :]
    if batch:
        yield batch


def _rest(views: list[memoryview], done: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[index + 1 :]]
        done -= view.nbytes
    return []


class AlignedValue:
    """The parts of one value as views for direct I/O (O_DIRECT). Borrows the parts.

    The bulk of a value moves straight between the disk and the caller's memory, where it must begin on a page boundary,
    as it does in the file. The head, small parts at the front and the last partial page are copied through pages of
    this module.
    """

    def __init__(self, lead: Sequence[memoryview], bulk: Sequence[memoryview], nbytes: int) -> None:
        self._lead = lead
        self._nbytes = nbytes
        self._start = form.start_for(nbytes, sum(part.nbytes for part in lead))
        front = self._start + sum(part.nbytes for part in lead)
        tail = bulk[-1].nbytes % form.PAGE
        pages = memoryview(mmap.mmap(-1, front + form.PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._front, self._page = pages[:front], pages[front:]
        self._tail = bulk[-1][bulk[-1].nbytes - tail :]
        self._views = [self._front, *bulk[:-1], bulk[-1][: bulk[-1].nbytes - tail]]
        if tail:
            self._views.append(self._page)

    def write(self, fd: int, check: Callable[[], None]) -> bool:
        """Write head and value at the beginning of the file; False if the kernel refuses direct I/O: then any part may
        have been written. Raises `OSError`."""
        self._front[: form.HEAD_BYTES] = form.pack_head(self._start, self._nbytes)
        offset = self._start
        for part in self._lead:
            self._front[offset : offset + part.nbytes] = part
            offset += part.nbytes
        self._page[: self._tail.nbytes] = self._tail
        return self._move(os.pwritev, fd, check)

    def read(self, fd: int, check: Callable[[], None]) -> bool:
        """Read head and value; False if the kernel refuses direct I/O, or the value does not begin at the offset that
        these parts need: the parts then hold undefined bytes. Raises `OSError`."""
        if not self._move(os.preadv, fd, check):
            return False
        if form.start_in(bytes(self._front[: form.HEAD_BYTES]), self._nbytes) != self._start:
            return False
        offset = self._start
        for part in self._lead:
            part[:] = self._front[offset : offset + part.nbytes]
            offset += part.nbytes
        self._tail[:] = self._page[: self._tail.nbytes]
        return True

    def _move(self, operation: Vectored, fd: int, check: Callable[[], None]) -> bool:
        enough = self._start + self._nbytes
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
            moved = move(operation, fd, self._views, check, enough=enough)
        except OSError as error:
            if error.errno not in form.REFUSALS:
                raise
            moved = 0
        fcntl.fcntl(fd, fcntl.F_SETFL, 0)
        return moved >= enough


def align(parts: Sequence[memoryview], nbytes: int) -> AlignedValue | None:
    """The value of `parts` (of bytes, none empty, `nbytes` together); None if their memory is not aligned for direct
    I/O."""
    lead, index = form.lead_bytes(parts), 0
    while index < len(parts) and parts[index].nbytes < form.PAGE:
        index += 1
    bulk = parts[index:]
    if not bulk or lead > form.PAGE or any(_address(part) % form.PAGE for part in bulk):
        return None
    if any(part.nbytes % form.PAGE for part in bulk[:-1]):
        return None
    return AlignedValue(parts[:index], bulk, nbytes)


def _address(view: memoryview) -> int:
    """The address of the view; 1, which is not aligned, for read-only memory, whose address Python does not give."""
    return 1 if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))


# O_NONBLOCK: opening a FIFO in place of a file would block.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_FILE = (errno.ELOOP, errno.ENXIO)  # a symbolic link, a socket


def look(root: Root, key: PackedKey) -> Outcome:
    """FOUND, MISSING, or DAMAGED if the path is not a file. Raises `OSError`."""
    folder, name = form.place_of(key)
    try:
        found = os.stat(name, dir_fd=root.folders.at(folder), follow_symlinks=False)
    except FileNotFoundError:
        return Outcome.MISSING
    return Outcome.FOUND if stat.S_ISREG(found.st_mode) else Outcome.DAMAGED


def load(root: Root, key: PackedKey, parts: Sequence[memoryview], check: Callable[[], None]) -> int | Outcome:
    """Fill `parts` (of bytes, none empty) with the value: its bytes, or MISSING, FAILED or DAMAGED.

    Raises `OSError` for errors that do not concern this file alone, and the errors of `check`.
    """
    folder, name = form.place_of(key)
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
        nbytes = form.value_bytes(found.st_size) if stat.S_ISREG(found.st_mode) else None
        if nbytes is None or nbytes > sum(part.nbytes for part in parts):
            return Outcome.DAMAGED
        whole = _read(fd, trimmed(parts, nbytes), nbytes, root.direct_reads, check)
        return nbytes if whole else Outcome.DAMAGED
    finally:
        os.close(fd)


def _read(fd: int, parts: Sequence[memoryview], nbytes: int, direct: bool, check: Callable[[], None]) -> bool:
    head = bytearray(form.HEAD_BYTES)
    if nbytes < form.LARGE:
        whole = form.HEAD_BYTES + nbytes
        moved = move(os.preadv, fd, [memoryview(head), *parts], check, enough=whole)
        return moved == whole and form.start_in(bytes(head), nbytes) == form.HEAD_BYTES
    aligned = align(parts, nbytes) if direct else None
    if aligned is not None and aligned.read(fd, check):
        return True
    # A separate read, also because it makes the kernel read ahead: without it the first large read waits for the
    # disk.
    if os.preadv(fd, [head], 0) != form.HEAD_BYTES:
        return False
    start = form.start_in(bytes(head), nbytes)
    return start is not None and move(os.preadv, fd, parts, check, offset=start, enough=nbytes) == nbytes
