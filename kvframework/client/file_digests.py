"""Names of files by all of their bytes: XXH3-128, computed once a file and remembered for every process of the user.

Engine side. Files are read in threads, by one process at a time; others wait for its result. XXH3 distinguishes
contents that differ by accident, as checkpoints do; it does not protect from a crafted collision.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

_EVERY_S = 10.0
# A smaller read ends before a user wonders.
_WORTH_TELLING = 256 << 20


class Progress:
    """A counter of bytes out of `total`, for any thread. Never blocks but for the log."""

    def __init__(self, log: logging.Logger, what: str, total: int) -> None:
        self._log = log
        self._what = what
        self._total = total
        self._done = 0
        self._lock = threading.Lock()
        self._started = self._logged_at = time.monotonic()
        self._logs = total >= _WORTH_TELLING
        if self._logs:
            log.info("%s, %.1f GB", what, total / 1e9)

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            due = self._logs and now - self._logged_at >= _EVERY_S
            if due:
                self._logged_at = now
        if due:
            self._log.info("%s: %.1f of %.1f GB", self._what, self._done / 1e9, self._total / 1e9)

    def end(self) -> None:
        if self._logs:
            seconds = max(time.monotonic() - self._started, 1e-9)
            self._log.info("%s: done in %.1f s, %.2f GB/s", self._what, seconds, self._done / 1e9 / seconds)


# The memory of file digests: one private JSON file in the user's cache directory, shared by processes.
#
# It is only a cache: a problem with it costs a line in the log and reading the files. The file is replaced whole, so
# that no reader sees half of one, and written under a lock, so that no writer's results are lost.

log = logging.getLogger(__name__)

FILE_NAME = "file-digests.json"
_LOCK_NAME = "file-digests.lock"
_VERSION = 1
_MAX_ENTRIES = 8192
_MAX_BYTES = 4 << 20
# Times of files have a granularity, some milliseconds on local file systems, up to two seconds on others: a file that
# was changed less than this before it was read may be changed again without getting another time.
REST_S = 3.0
_POLL_S = 0.1
# The longest wait for another process's reading before this process reads by itself.
_PATIENCE_S = 900.0
_UNFINISHED_S = 3600.0


class FileState(NamedTuple):
    """The state of a file that changes with its content. `place` names the resolved path; times are nanoseconds.

    The ctime cannot be set back as the mtime can. Writes through a shared mapping change the times later than the
    content, and not at all on tmpfs: they are not seen.
    """

    place: str
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @staticmethod
    def of(path: Path) -> FileState:
        """Return the state of the file. Raises `OSError`."""
        real = os.path.realpath(path)
        found = os.stat(real)
        place = hashlib.blake2b(os.fsencode(real), digest_size=16).hexdigest()
        return FileState(place, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def rested(self, now: float) -> bool:
        """Return whether any change after `now` (seconds since the epoch) gives the file different times."""
        return now - max(self.mtime_ns, self.ctime_ns) / 1e9 > REST_S


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    place: str
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    digest: str


class _Content(msgspec.Struct, frozen=True):
    version: int
    entries: list[_Entry]


class DigestMemory:
    """The memory in `directory`, which is made private if it does not exist; without a directory (None) nothing is
    remembered."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    @staticmethod
    def of_user() -> DigestMemory:
        """Return the memory in `$XDG_CACHE_HOME/kvframework`, by default `~/.cache/kvframework`; without a home, one
        that remembers nothing."""
        given = os.environ.get("XDG_CACHE_HOME", "")
        try:
            base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
        except RuntimeError:
            return DigestMemory(None)
        return DigestMemory(base / "kvframework")

    def load(self) -> dict[FileState, str]:
        """Return all remembered digests; none, with a line in the log, if the file is damaged or not private."""
        if self._directory is None:
            return {}
        path = self._directory / FILE_NAME
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return {}
        except OSError as error:
            log.warning("remembered digests are not used: %s", error)
            return {}
        try:
            with open(descriptor, "rb") as file:
                _check_private(os.fstat(file.fileno()))
                content = msgspec.json.decode(file.read(_MAX_BYTES + 1), type=_Content)
            if content.version != _VERSION:
                raise ValueError(f"it has version {content.version}, this is {_VERSION}")
        except (OSError, ValueError) as error:
            log.warning("remembered digests are not used, %s will be written again: %s", path, error)
            return {}
        return {FileState(*msgspec.structs.astuple(each)[:5]): each.digest for each in content.entries}

    def remember(self, digests: Mapping[FileState, str]) -> None:
        """Add digests, for each file its newest state; the oldest entries are dropped when there are too many. Call it
        under `lock`. A failure costs a line in the log."""
        if self._directory is None or not digests:
            return
        places = {state.place for state in digests}
        kept = {state: digest for state, digest in self.load().items() if state.place not in places}
        entries = [_Entry(*state, digest) for state, digest in {**kept, **digests}.items()][-_MAX_ENTRIES:]
        path = self._directory / FILE_NAME
        written = path.with_name(f"{FILE_NAME}.{secrets.token_hex(8)}")
        try:
            _remove_unfinished(self._directory)
            try:
                with open(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                    file.write(msgspec.json.encode(_Content(_VERSION, entries)))
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(written, path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    written.unlink()
        except OSError as error:
            log.warning("digests are not remembered: %s", error)

    @contextlib.contextmanager
    def lock(self, until: Callable[[], bool]) -> Iterator[None]:
        """Hold the lock, which one process at a time has and the kernel releases at that process's end. Waits for it
        until `until` is true, for 15 minutes at most; continues without it then, and where a directory cannot be
        locked."""
        descriptor = self._open_lock()
        try:
            if descriptor is not None:
                _wait(descriptor, until)
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _open_lock(self) -> int | None:
        if self._directory is None:
            return None
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(os.stat(self._directory))
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(self._directory / _LOCK_NAME, flags, 0o600)
        except OSError as error:
            log.warning("digests are computed without a lock: %s", error)
            return None


def _wait(descriptor: int, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    logged = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if until() or time.monotonic() > deadline:
                return
        except OSError as error:
            log.warning("digests are computed without a lock: %s", error)
            return
        if not logged:
            logged = True
            log.info("another process reads files to name their content: waiting for what it finds")
        time.sleep(_POLL_S)


def _remove_unfinished(directory: Path) -> None:
    """Remove the unfinished files of writers that were killed."""
    for path in directory.glob(f"{FILE_NAME}.*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _UNFINISHED_S:
                path.unlink()


def _check_private(found: os.stat_result) -> None:
    """Raise `OSError` for a file that other users may write: they could give one content the name of another."""
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise OSError("others than this user may write it")


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
