"""The reference for the filesystem tier: plain sequential reads and writes of whole files, and their share of the
page cache. No names, no rename, no envelope. Blocks; raises `OSError`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

# Bytes of one system call: the fastest where it was tried. A small first read makes the kernel read ahead.
_FIRST = mmap.PAGESIZE
_STEP = 1 << 20
_DIRECT_STEP = 8 << 20

_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_mincore.restype = ctypes.c_int


def write_files(paths: Sequence[Path], values: Sequence[memoryview], *, direct: bool, sync: bool) -> float:
    """Return the seconds of writing each value into a new file. `direct` bypasses the page cache (then values are
    page-aligned and whole pages); `sync` has each file on the disk before the next."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
    step = _DIRECT_STEP if direct else _STEP
    started = time.perf_counter()
    for path, value in zip(paths, values, strict=True):
        fd = os.open(path, flags, 0o600)
        try:
            at = 0
            while at < value.nbytes:
                at += os.pwrite(fd, value[at : at + step], at)
            if sync:
                os.fdatasync(fd)
        finally:
            os.close(fd)
    return time.perf_counter() - started


def read_files(paths: Sequence[Path], rooms: Sequence[memoryview]) -> float:
    """Return the seconds of reading each file into the beginning of a room of its own, which is at least as long."""
    started = time.perf_counter()
    for path, room in zip(paths, rooms, strict=True):
        fd = os.open(path, os.O_RDONLY)
        try:
            at = os.preadv(fd, [room[:_FIRST]], 0)
            while done := os.preadv(fd, [room[at : at + _STEP]], at):
                at += done
        finally:
            os.close(fd)
    return time.perf_counter() - started


def can_bypass_cache(folder: Path) -> bool:
    """Return whether files in `folder` can be written past the page cache."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page, contextlib.suppress(OSError):
        fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_DIRECT, 0o600)
        try:
            os.pwrite(fd, page, 0)
            return True
        finally:
            os.close(fd)
    return False


def settle(paths: Sequence[Path]) -> None:
    """Write the files to the disk, so that no other measurement pays for them."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)


def drop_from_cache(paths: Sequence[Path]) -> None:
    """Ask the kernel to drop the files' pages, which works for those that are on a disk."""
    settle(paths)
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def cached_share(paths: Sequence[Path]) -> float:
    """Return the share of the files that is in the page cache now, from 0 to 1. Changes nothing about it."""
    here = total = 0
    for path in paths:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            pages = bytearray(-(-len(mapped) // mmap.PAGESIZE))
            first, state = ctypes.c_char.from_buffer(mapped), ctypes.c_char.from_buffer(pages)
            failed = _mincore(ctypes.addressof(first), len(mapped), ctypes.addressof(state))
            del first, state  # else neither can be closed
            if failed:
                raise OSError(ctypes.get_errno(), "mincore failed", str(path))
            here += sum(page & 1 for page in pages)
            total += len(pages)
    return here / total if total else 0.0


def file_system(path: Path) -> str:
    """Return the type of the file system that holds `path`, such as ext4; "" if unknown."""
    resolved, best, kind = path.resolve(), -1, ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, source = line.partition(" - ")
        point = Path(mount.split()[4])
        if resolved.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), source.split()[0]
    return kind
