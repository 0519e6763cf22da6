"""An engine process's mapping of the server's arena, and the thread that maps its resident pages ahead of copies."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import select
import threading
import time
import weakref
from itertools import groupby

from kvframework.api.copying import address_of
from kvframework.api.memory import SharedMapping, available_memory, map_shared
from kvframework.messaging.polling import close_after_fork

log = logging.getLogger(__name__)

_MADV_POPULATE_READ = 22  # Linux 5.14. A shared page that was read may be written without another fault.
# While a step runs, the process can neither map nor unmap memory: some 0.5 ms.
_STEP = 2 << 20
# How often the room for page tables is asked for, and how much must be left: without it the kernel might end somebody.
_ROOM_EVERY, _ROOM = 256 << 20, 256 << 20
# The server makes its memory resident at a GB a second or so: the pauses reach for a TiB.
_PAUSES_S = [0.5 * 2**i for i in range(11)]

_libc = ctypes.CDLL(None, use_errno=True)
_madvise, _mincore = _libc.madvise, _libc.mincore
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class _Gone(Exception):
    """The arena is mapped no more."""


def _map_all(reference: weakref.ref[MappedArena]) -> None:
    """Map the resident pages before a copy needs them: the first write to a page costs a fault, which takes longer than
    the copy of the page. A failure leaves the rest to the copies.

    Only pages that the server has made resident are mapped, so nothing but page tables is charged to this process, 2
    MiB for each GiB of small pages. The thread works in small steps, and rests after each for as long as it took. It
    has only a weak reference to the arena, whose end is the end of the work: no step, which a busy machine may leave
    without a turn for long, delays it. Its priority is the usual one: whatever a thread of a lower one holds when it
    loses its core, the interpreter or the lock of the address space, the engine waits for."""
    try:
        begins, examined = list(range(0, _mapping(reference).nbytes, _STEP)), 0
        for pause in _PAUSES_S:
            later: list[int] = []
            for begin in begins:
                if examined % _ROOM_EVERY == 0 and available_memory() < _ROOM:
                    log.debug("the rest of the arena is not mapped ahead: too little memory is left")
                    return
                examined += _STEP
                started = time.monotonic()
                if not _map_step(reference, begin):
                    later.append(begin)
                time.sleep(time.monotonic() - started)
            if not later:
                return
            begins = later
            time.sleep(pause)
    except _Gone:
        return
    except OSError as error:
        log.debug("the rest of the arena is not mapped ahead: %s", error)


def _map_step(reference: weakref.ref[MappedArena], begin: int) -> bool:
    """Map the resident pages of one step; return whether they were all. Only meanwhile the mapping is referred to.
    Raises `OSError`, also where the kernel does not know the advice."""
    with (
        _mapping(reference).view() as all_of_it,
        all_of_it[begin : begin + _STEP] as step,
        address_of(step, True) as (address, nbytes),
    ):
        pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
        _check(_mincore(address, nbytes, pages))
        first = 0
        for is_resident, run in groupby(page & 1 for page in pages):
            last = first + sum(1 for _ in run)
            if is_resident:
                length = min(last * mmap.PAGESIZE, nbytes) - first * mmap.PAGESIZE
                _check(_madvise(address + first * mmap.PAGESIZE, length, _MADV_POPULATE_READ))
            first = last
        return all(page & 1 for page in pages)


def _mapping(reference: weakref.ref[MappedArena]) -> SharedMapping:
    arena = reference()
    if arena is None:
        raise _Gone
    return arena.mapping


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class MappedArena:
    """The mapping of a memfd that came over the liveness socket. Owns both descriptors.

    There is no call to unmap it: each copy holds a reference to `view` (a tensor made from it does), and the mapping
    ends with the last one. Until then `alive_fd` (a copy of the liveness socket) stays open, so the server cannot take
    this process for dead and give a range to another client while it is still written here. What only maps pages ahead
    holds `mapping`, and the session may end under it.

    Forked children do not inherit the memory, and close the arena's descriptors, so that the end of this process is the
    end of all its writes, and of its locks on what it may write."""

    def __init__(self, arena_fd: int, alive_fd: int | None) -> None:
        # Of the monotonic clock: the session is older than that.
        self.since = time.monotonic()
        try:
            status = os.fstat(arena_fd)
            mapping = map_shared(arena_fd, status.st_size)
            reserved = os.fstatvfs(arena_fd).f_bsize > mmap.PAGESIZE
            mapping.memory.madvise(mmap.MADV_DONTFORK)
        except BaseException:
            if alive_fd is not None:
                os.close(alive_fd)
            raise
        finally:
            os.close(arena_fd)
        written = (ctypes.c_char * mapping.nbytes).from_buffer(mapping.memory, mapping.begin)
        self._writers = _Writers(mapping.memory, (status.st_dev, status.st_ino), alive_fd)
        # At the process's end the kernel closes it, after the last thread that could write has ended.
        weakref.finalize(written, self._writers.ended).atexit = False
        self.mapping = mapping
        self.view = memoryview(written).cast("B")
        self._ahead = threading.Lock()
        if reserved:
            # `mincore` does not tell what is resident of reserved huge pages, and there is next to nothing to gain.
            self._ahead.acquire()

    @property
    def is_served(self) -> bool:
        """Whether the server still has the session for which it was mapped: once that has ended, the server has closed
        its end of the liveness socket, before anything that the session held."""
        if self._writers.alive_fd is None:
            return False
        poll = select.poll()
        poll.register(self._writers.alive_fd, select.POLLIN)
        return not poll.poll(0)

    def map_ahead(self) -> None:
        """Map the resident pages in the background, once. Never blocks."""
        if not self._ahead.acquire(blocking=False):
            return
        thread = threading.Thread(target=_map_all, args=(weakref.ref(self),), name="kvf-map-ahead", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread is left
            log.debug("the arena is not mapped ahead: %s", error)


class _Writers:
    """What lasts as long as anything that can write the memory, the arena's own object or a copy that outlives it."""

    def __init__(self, memory: mmap.mmap, file: tuple[int, int], alive_fd: int | None) -> None:
        self.alive_fd = alive_fd
        self._memory = memory
        self._file = file
        close_after_fork(self)

    def ended(self) -> None:
        if self.alive_fd is not None:
            os.close(self.alive_fd)

    def close_in_child(self) -> None:
        """Leave the memory in a forked child, never unmapped: its addresses may belong to other mappings by now."""
        alive_fd, self.alive_fd = self.alive_fd, None
        if alive_fd is not None:
            os.close(alive_fd)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._memory))
        # Among them the one of the mapping object, which lasts from here on.
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                status = os.fstat(fd)
                if (status.st_dev, status.st_ino) == self._file:
                    os.close(fd)
