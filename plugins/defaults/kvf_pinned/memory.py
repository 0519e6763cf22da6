"""The arena: a memfd, its mapping, and the thread that makes it resident. Lives in the server process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from kvf_pinned.nodes import ANYWHERE, SMALL, TURN_ON, Choice, HugePages, Pages, choose_pages, hint, place
from kvframework.api.memory import Memory, SharedMapping, available_memory, map_shared
from kvframework.api.plugin import ByteSize
from kvframework.errors import ArenaError

_MADV_POPULATE_WRITE = 23  # Linux 5.14

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise.restype = ctypes.c_int


class Toucher:
    """Makes ranges of `segment`, which maps all of `fd`, resident. Owns neither. `kept`: the bytes stay as they are.
    `outlives`: a next server waits until the segment is unmapped at the end of this process."""

    def __init__(self, segment: SharedMapping, fd: int, *, kept: bool = False, outlives: bool = False) -> None:
        self._kept = kept
        self._outlives = outlives
        self._segment = segment
        self._fd = fd
        anchor = ctypes.c_char.from_buffer(segment.memory, segment.begin)
        self._address = ctypes.addressof(anchor)  # the anchor is not kept: it would prevent closing the mapping
        self._populates = True

    def touch(self, start: int, end: int) -> None:
        """Make bytes `[start, end)` resident; `start` is a multiple of the page size. Blocks while the kernel clears
        the pages, without the interpreter lock. Raises `OSError` (ENOMEM, ENOSPC) if there is no memory."""
        if self._kept:
            os.posix_fallocate(self._fd, start, end - start)
            return
        if self._populates:
            self._populates = self._populate(start, end)
        if not self._populates:
            # Reserves the pages first: a write to a page that cannot be allocated would be a SIGBUS.
            os.posix_fallocate(self._fd, start, end - start)
            pages = len(range(start, end, mmap.PAGESIZE))
            with self._segment.view() as view:
                view[start : end : mmap.PAGESIZE] = bytes(pages)
        if self._outlives:
            # The pages stay in the file, but out of the page tables of this process: at its end the kernel would clear
            # them, 0.1 s a GiB, and only then tells the keeper of it.
            _madvise(self._address + start, end - start, mmap.MADV_DONTNEED)

    def _populate(self, start: int, end: int) -> bool:
        """False if the kernel does not know the advice."""
        while _madvise(self._address + start, end - start, _MADV_POPULATE_WRITE) != 0:
            code = ctypes.get_errno()
            if code == errno.EINVAL:
                return False
            if code not in (errno.EINTR, errno.EAGAIN):
                raise OSError(code, os.strerror(code))
        return True


_log = logging.getLogger(__name__)

# A step bounds how long `close` waits and how late the first bytes are ready.
_STEP = 16 << 20

# No client may truncate the file under the server, grow it, or add seals that stop others from mapping it.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def check_room(capacity: int, pages: Pages, where: str) -> None:
    """Refuse an arena beyond the memory that is available now, or beyond the limits of this process. Reserved pages
    are apart from that memory. Raises `ArenaError`."""
    room, what = (sys.maxsize if pages.kind == "reserved" else available_memory()), "memory"
    for limit, name in ((resource.RLIMIT_FSIZE, "the limit of a file (ulimit -f)"), (resource.RLIMIT_AS, "ulimit -v")):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and soft < room:
            room, what = soft, name
    if capacity > room:
        raise ArenaError(
            f"an arena of {ByteSize(capacity)} does not fit into {what}",
            where=where,
            available=str(ByteSize(room)),
            hint="lower [l1] capacity",
        )


def check_pages(wanted: HugePages, capacity: int, *, where: str, sysfs: Path = Path("/sys")) -> Pages:
    """Refuse "on" where the machine has no huge pages for the arena. Raises `ArenaError`."""
    pages = choose_pages(wanted, capacity, sysfs)
    if wanted == "on" and pages.kind == "small":
        raise ArenaError(
            f"no huge pages: {pages.reason}", where=where, hint=f'{TURN_ON}, or set [l1] huge_pages = "auto"'
        )
    return pages


def _new_file(capacity: int, pages: Pages) -> int:
    """Raise `OSError`."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if pages.kind == "reserved":
        flags |= os.MFD_HUGETLB | (pages.size.bit_length() - 1) << os.MFD_HUGE_SHIFT
    fd = os.memfd_create("kvframework-l1", flags)
    try:
        os.ftruncate(fd, capacity)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


class MemfdArena(Memory):
    """One shared segment without a name: the kernel frees it when the last process that maps it ends. Owns `fd` and the
    mapping until `close`, which may come while the background thread works."""

    def __init__(
        self,
        capacity: int,
        *,
        where: str = "[l1]",
        choice: Choice = ANYWHERE,
        pages: Pages = SMALL,
        kept: int | None = None,
        outlives: bool = False,
    ) -> None:
        """Does not touch the memory. `kept` is the descriptor of an arena of an earlier server, owned from here on: its
        bytes stay. `outlives`: a next server goes on with this one. Raises `ArenaError` if the arena does not fit, or
        cannot be created or mapped. Unavailable NUMA nodes are no error, and logged."""
        self._where = where
        self._kept = kept is not None
        self._outlives = outlives
        self.capacity = capacity = pages.whole(capacity)
        if kept is None:
            check_room(capacity, pages, where)
        try:
            self.fd = kept if kept is not None else _new_file(capacity, pages)
        except OSError as error:
            raise self._refused(error) from error
        try:
            if os.fstat(self.fd).st_size != capacity or fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ValueError("the kept memory does not match the options of [l1]")
            # Of reserved pages the mapping is the promise: it fails if they are too few.
            self._segment = map_shared(self.fd, capacity)
        except (OSError, ValueError, OverflowError) as error:
            os.close(self.fd)
            raise self._refused(error) from error
        for advice in (mmap.MADV_NOHUGEPAGE if pages.kind == "small" else mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP):
            with contextlib.suppress(OSError):
                self._segment.advise(advice)
        _log.info("%s: %s: %s", where, pages, pages.reason)
        if choice.nodes:
            self._place(choice)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, on_ready: Callable[[int], None]) -> None:
        """Start the background thread, which ends by itself once all is resident, or the memory has run out: bytes
        that were ready stay usable then. Once per arena, else `ArenaError`."""
        if self._stop.is_set() or self._thread is not None:
            raise ArenaError("the arena was already started or closed", where=self._where)
        self._thread = threading.Thread(target=self._touch_all, args=(on_ready,), name="kvf-pinned", daemon=True)
        self._thread.start()

    def view(self) -> memoryview:
        """A new writable view of all bytes; the caller releases it before `close`. Raises `ArenaError` once closed."""
        if self._stop.is_set():
            raise ArenaError("the arena is closed", where=self._where)
        return self._segment.view()

    def close(self) -> None:
        """End the background thread (waits for its current step), close fd and mapping. Raises `BufferError` while a
        view is still exported: the fd is closed then, and `close` can be called again once the views are released."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        try:
            self._segment.memory.close()
        except BufferError:
            raise BufferError("the arena is in use; release every memoryview of view() before close()") from None

    def leave(self) -> None:
        """Stop the background thread and leave the mapping to the end of the process. Unmapping a large arena takes
        seconds, and meanwhile the process can neither map memory nor start a thread."""
        self._stop.set()

    def _place(self, choice: Choice) -> None:
        """Set the NUMA nodes before any page is resident: a resident page does not move."""
        try:
            with self._segment.view() as view:
                place(view, choice.nodes)
        except OSError as error:
            line = "%s: the kernel chooses the arena's NUMA nodes, because it refused %s: %s; %s"
            _log.warning(line, self._where, choice.names, error.strerror, hint(error))
        else:
            _log.info("%s: the arena %s", self._where, choice)

    def _touch_all(self, on_ready: Callable[[int], None]) -> None:
        toucher, done = Toucher(self._segment, self.fd, kept=self._kept, outlives=self._outlives), 0
        try:
            while done < self.capacity and not self._stop.is_set():
                end = min(done + _STEP, self.capacity)
                toucher.touch(done, end)
                done = end
                on_ready(done)
        except OSError as error:
            line = "%s: the arena stays at %s of %s: %s; lower [l1] capacity"
            _log.error(line, self._where, ByteSize(done), ByteSize(self.capacity), error.strerror)

    def _refused(self, error: Exception) -> ArenaError:
        fact = f"an arena of {ByteSize(self.capacity)} cannot be made: {getattr(error, 'strerror', None) or error}"
        return ArenaError(fact, where=self._where, hint="lower [l1] capacity")
