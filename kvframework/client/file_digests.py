"""Names of files by all of their bytes: XXH3-128, computed once a file and remembered for every process of the user.

Engine side. Files are read in threads, by one process at a time; others wait for its result. XXH3 distinguishes
contents that differ by accident, as checkpoints do; it does not protect from a crafted collision.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import xxhash

from kvframework.client.digest_memory import DigestMemory, FileState
from kvframework.client.read_progress import Progress

log = logging.getLogger(__name__)

_CHUNK_BYTES = 8 << 20
_THREADS = 8
# A file that is replaced during the read is read again; after this many attempts it fails.
_ATTEMPTS = 3


class FileDigest(NamedTuple):
    """`digest` is XXH3-128 of the whole content, 32 hex digits; `size` in bytes."""

    size: int
    digest: str


def digest_files(paths: Iterable[Path], memory: DigestMemory | None = None) -> dict[Path, FileDigest]:
    """Return the digest of each file, in the order given; links are followed.

    Blocks until every file that is not remembered has been read whole (8 MiB of memory for each of up to 8 threads), or
    another process has. Remembered digests are in `memory`, by default that of the user, and are valid only while path,
    inode, size, mtime and ctime are unchanged. Raises `OSError` for a file that cannot be read, or is written all the
    time.
    """
    memory = memory if memory is not None else DigestMemory.of_user()
    wanted = list(paths)
    found = _remembered(wanted, memory)
    if len(found) < len(wanted):
        # The process that held the lock may have read the same files.
        with memory.lock(until=lambda: len(_remembered(wanted, memory)) == len(wanted)):
            found = _remembered(wanted, memory)
            unread = [path for path in wanted if path not in found]
            if unread:
                found.update(_read_all(unread, memory))
    return {path: found[path] for path in wanted}


def _remembered(paths: Sequence[Path], memory: DigestMemory) -> dict[Path, FileDigest]:
    known = memory.load()
    found = {}
    for path in paths:
        state = FileState.of(path)
        digest = known.get(state)
        if digest is not None:
            found[path] = FileDigest(state.size, digest)
    return found


def _read_all(paths: Sequence[Path], memory: DigestMemory) -> dict[Path, FileDigest]:
    """Read the files, the largest first, and remember those that had rested before."""
    by_size = sorted(paths, key=lambda path: path.stat().st_size, reverse=True)
    progress = Progress(
        log, f"reading {len(by_size)} files to name their content", sum(path.stat().st_size for path in by_size)
    )
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), thread_name_prefix="kvf-digest") as pool:
        read = list(pool.map(lambda path: _read(path, progress), by_size))
    progress.end()
    memory.remember({state: digest for state, digest, started in read if state.rested(started)})
    return {path: FileDigest(state.size, digest) for path, (state, digest, _) in zip(by_size, read, strict=True)}


def _read(path: Path, progress: Progress) -> tuple[FileState, str, float]:
    """Return the state in which the whole file was read, its digest, and the time at which reading began (seconds since
    the epoch)."""
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for _ in range(_ATTEMPTS):
        started, before = time.time(), FileState.of(path)
        hasher = xxhash.xxh3_128()
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                hasher.update(buffer[:count])
                progress.add(count)
        if FileState.of(path) == before:
            return before, hasher.hexdigest(), started
    raise OSError(f"{path} was changed each of {_ATTEMPTS} times while it was read")
