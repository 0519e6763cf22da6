"""The filesystem tier: batches over single files, and the handling of file system errors. Runs in the caller's storage
thread.

Writing, touching and removal of one object's file, and its bytes in the ledger. A value is written to a temporary
file beside its place, which is then renamed. Runs in the caller's storage thread.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TypeVar

from kvf_filesystem import FilesystemOptions, form
from kvf_filesystem.form import FOLDERS
from kvf_filesystem.ledger import Counting, Ledger, Limit, Lister, SharedRoot
from kvf_filesystem.reading import align, load, look, move
from kvf_filesystem.root import Root, open_again_at, open_root
from kvframework.api.tier import Outcome, PackedKey, Tier, TierEntry, TierUsage
from kvframework.errors import TierError

T = TypeVar("T")

_CLOSE_S = 5.0

_HINTS = {
    errno.EACCES: "give the server's user read and write access to the folder and its content",
    errno.EPERM: "give the server's user read and write access to the folder and its content",
    errno.EROFS: "the file system is read-only: see the kernel's log, and mount it writable",
    errno.ENOENT: "the folder was removed: create the folder again",
    errno.EIO: "the disk has failed: see the kernel's log",
    errno.ENOTDIR: "the tier expects a folder here: remove the file or link",
    errno.ESTALE: "the file server lost the folder: the next call opens the folder again",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def open_tier(options: FilesystemOptions, *, where: str) -> Tier:
    """The tier, with quotas where they are installed; opens its folder, or creates it. Raises `ConfigFieldError`."""
    kind = FilesystemTier
    if find_spec("kvf_quota") is not None:
        from kvf_quota.in_folder import QuotaFolder as kind  # noqa: N813
    return kind(open_root(options, where=where), options, where=where)


class FilesystemTier(Tier):
    """A file per value in fan-out folders below one folder. Thread-safe; owns `root` until `close`."""

    name = "filesystem"

    def __init__(self, root: Root, options: FilesystemOptions, *, where: str) -> None:
        self._where = f"{where}: {options.path}"
        token = secrets.token_hex(8)
        self._ledger = Ledger(options.capacity, FOLDERS)
        self._writer = Writer(self._ledger, fsync=options.fsync, token=token)
        self._lister = Lister(self._ledger, shared=options.shared, token=token)

        self._path = root.path

        def open_again() -> Root:
            root = open_again_at(self._path, options, where=where)
            self._counting.again()
            return root

        self._shared_root = SharedRoot(root, open_again, where=self._where)
        every_s = options.recount_s if options.shared else None
        self._counting = Counting(self._count, every_s=every_s, where=self._where)

    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        return self._each(lambda root, index, _limit: look(root, keys[index]), len(keys), deadline)

    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        return self._each(
            lambda root, index, limit: load(root, keys[index], _flat(parts[index]), limit.check), len(keys), deadline
        )

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        """Nothing can be stored before the folder's bytes are counted (a while after the start): the call waits for
        that for half of its time, and then every key is FAILED."""

        def store(root: Root, index: int, limit: Limit) -> Outcome:
            counted = self._counting.wait(limit.remaining() / 2)
            limit.check()
            if not counted:
                return Outcome.FAILED
            return self._writer.store(root, keys[index], _flat(parts[index]), limit)

        return self._each(store, len(keys), deadline)

    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        """FAILED where a folder that is not empty stands in a file's place."""
        return self._each(lambda root, index, limit: self._writer.remove(root, keys[index], limit), len(keys), deadline)

    def touch(self, keys: Sequence[PackedKey], *, deadline: float) -> None:
        self._each(lambda root, index, _limit: touch(root, keys[index]), len(keys), deadline)

    def usage(self, *, deadline: float) -> TierUsage:
        """Bytes of values; waits for the first count for half of its time, then returns the bytes counted so far. The
        capacity is less than configured where the file system has less room than that."""

        def measure(root: Root, limit: Limit) -> TierUsage:
            self._counting.wait(limit.remaining() / 2)
            disk = os.statvfs(root.fd)
            used = self._ledger.used
            return TierUsage(used, min(self._ledger.capacity, used + disk.f_bavail * disk.f_frsize))

        return self._run(measure, deadline)

    def scan(self, *, deadline: float) -> Iterator[TierEntry]:
        """Lists one folder of the fan-out at a time, and counts it again."""
        for folder in range(FOLDERS):
            yield from self._run(partial(self._lister.entries, folder=folder), deadline)

    def ping(self, *, deadline: float) -> None:
        def ask(root: Root, _limit: Limit) -> None:
            if not root.usable():
                code = errno.EROFS if os.fstatvfs(root.fd).f_flag & os.ST_RDONLY else errno.EACCES
                raise OSError(code, os.strerror(code))

        self._run(ask, deadline)

    def problems(self) -> list[str]:
        """What the kernel said to the last write, until one succeeds."""
        trouble = self._writer.trouble
        return [f"{self._path}: {trouble}"] if trouble else []

    def close(self) -> None:
        """Wait a few seconds at most, for the counting thread; not for calls in flight, which fail by themselves."""
        self._shared_root.close()
        self._counting.close(_CLOSE_S)

    def _each(self, work: Callable[[Root, int, Limit], T], count: int, deadline: float) -> list[T]:
        def run(root: Root, limit: Limit) -> list[T]:
            results = []
            for index in range(count):
                limit.check()
                results.append(work(root, index, limit))
            return results

        return self._run(run, deadline)

    def _run(self, work: Callable[[Root, Limit], T], deadline: float) -> T:
        """Call `work` with the open folder. No reference outlives the call: the raised error has no context whose
        frames would keep the caller's buffers."""
        limit = Limit(deadline, lambda: self._shared_root.closed)
        try:
            limit.check()
            with self._shared_root.borrow() as root:
                try:
                    return work(root, limit)
                except OSError as error:
                    if error.errno == errno.ESTALE:
                        self._shared_root.lost(root)
                    raise
        except TierError as error:
            fact, hint = error.fact, error.hint
        except OSError as error:
            fact, hint = error.strerror or type(error).__name__, _HINTS.get(error.errno or 0, "")
        raise TierError(fact, where=self._where, hint=hint)

    def _count(self) -> None:
        for folder in range(FOLDERS):
            limit = Limit(time.monotonic() + 600, lambda: self._shared_root.closed)
            with self._shared_root.borrow() as root:
                self._lister.entries(root, limit, folder=folder)


def _flat(parts: Sequence[memoryview]) -> list[memoryview]:
    return [part.cast("B") for part in parts if part.nbytes]


_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)


class Writer:
    """Stores and removes files. Thread-safe. `token` names this tier's temporary files."""

    def __init__(self, ledger: Ledger, *, fsync: str, token: str) -> None:
        self._ledger = ledger
        self._syncs_data = fsync != "none"
        self._syncs_names = fsync == "full"
        self._token = token
        self._numbers = itertools.count()
        # What the kernel said to the last write, "" if that succeeded.
        self.trouble = ""

    def store(self, root: Root, key: PackedKey, parts: Sequence[memoryview], limit: Limit) -> Outcome:
        """Write the value of `parts` (of bytes, none empty): STORED, or FAILED if there is no room for it or its path
        cannot be replaced.

        Raises `OSError` for errors that do not concern this file alone, and the errors of `limit`; the temporary file
        is removed then.
        """
        nbytes = sum(part.nbytes for part in parts)
        folder, name = form.place_of(key)
        try:
            if not self._ledger.reserve(nbytes, _bytes_at(self._made(root, folder), name)):
                return Outcome.FAILED
            try:
                return self._write_and_publish(root, folder, name, parts, nbytes, limit)
            finally:
                self._ledger.release(nbytes)
        except OSError as error:
            self.trouble = error.strerror or type(error).__name__
            if error.errno in _FULL:
                return Outcome.FAILED
            raise

    def remove(self, root: Root, key: PackedKey, limit: Limit) -> Outcome:
        """Remove the file, or an empty folder in its place: DELETED, MISSING or FAILED. Raises `OSError` and
        `TierError`."""
        folder, name = form.place_of(key)
        try:
            with limit.holding(self._ledger.locks[folder]):
                fd = root.folders.now(folder)
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    os.rmdir(name, dir_fd=fd)
                else:
                    os.unlink(name, dir_fd=fd)
                self._ledger.change(folder, -_counted(found))
        except FileNotFoundError:
            return Outcome.MISSING
        except OSError as error:
            if error.errno in _NOT_EMPTY or root.spared_by(error, folder):
                return Outcome.FAILED
            raise
        return Outcome.DELETED

    def _write_and_publish(
        self, root: Root, folder: int, name: str, parts: Sequence[memoryview], nbytes: int, limit: Limit
    ) -> Outcome:
        temporary, folder_fd = form.temporary_name(self._token, next(self._numbers)), root.folders.at(folder)
        fd = os.open(temporary, _FLAGS, 0o600, dir_fd=folder_fd)
        published = False
        try:
            try:
                _write(fd, parts, nbytes, root.direct_writes, limit)
                if self._syncs_names:
                    os.fsync(fd)
                elif self._syncs_data:
                    os.fdatasync(fd)
            finally:
                os.close(fd)  # NFS reports here that the disk is full
            limit.check()
            published = self._publish(root, folder, name, temporary, nbytes, limit)
        finally:
            if not published:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder_fd)
        if self._syncs_names:
            os.fsync(folder_fd)
        if published:
            self.trouble = ""
        return Outcome.STORED if published else Outcome.FAILED

    def _made(self, root: Root, folder: int) -> int:
        """The descriptor of the folder, which is made if it is missing."""
        try:
            return root.folders.now(folder)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.mkdir(form.folder_name(folder), 0o700, dir_fd=root.fd)
        if self._syncs_names:
            os.fsync(root.fd)
        return root.folders.now(folder)

    def _publish(self, root: Root, folder: int, name: str, temporary: str, nbytes: int, limit: Limit) -> bool:
        with limit.holding(self._ledger.locks[folder]):
            # The one in its place may be another by now, without the temporary file.
            fd = root.folders.now(folder)
            replaced, promised = _bytes_at(fd, name), _promised_at(fd, name)
            if not self._ledger.replace(folder, nbytes, replaced):
                return False
            try:
                if promised:
                    os.utime(temporary, (promised, promised), dir_fd=fd, follow_symlinks=False)
                _rename(fd, temporary, name)
            except OSError as error:
                self._ledger.change(folder, replaced - nbytes)
                # ENOENT: the temporary file was swept, or the folder removed.
                if error.errno in (errno.ENOENT, *_NOT_EMPTY) or root.spared_by(error, folder):
                    return False
                raise
        return True


def touch(root: Root, key: PackedKey) -> None:
    """Set the time of the file, unless it has a second name, which may be outside of the folder, or lies ahead, as that
    of a promised value does. Raises `OSError`."""
    folder, name = form.place_of(key)
    with contextlib.suppress(FileNotFoundError):
        fd = root.folders.at(folder)
        found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_mtime <= time.time():
            os.utime(name, dir_fd=fd, follow_symlinks=False)


def _write(fd: int, parts: Sequence[memoryview], nbytes: int, direct: bool, limit: Limit) -> None:
    aligned = align(parts, nbytes) if direct and nbytes >= form.LARGE else None
    if aligned is None or not aligned.write(fd, limit.check):
        start = form.start_for(nbytes, form.lead_bytes(parts))
        front = memoryview(form.pack_head(start, nbytes).ljust(start, b"\0"))
        whole = start + nbytes
        if move(os.pwritev, fd, [front, *parts], limit.check, enough=whole) < whole:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
    if nbytes >= form.LARGE:
        os.ftruncate(fd, form.file_bytes(nbytes))


def _rename(folder_fd: int, temporary: str, name: str) -> None:
    try:
        os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    except IsADirectoryError:
        os.rmdir(name, dir_fd=folder_fd)
        os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)


def _bytes_at(folder_fd: int, name: str) -> int:
    try:
        return _counted(os.stat(name, dir_fd=folder_fd, follow_symlinks=False))
    except FileNotFoundError:
        return 0


def _promised_at(folder_fd: int, name: str) -> float:
    """Return until when the value is promised, which is the time of its file; 0.0 for one that is not."""
    try:
        until = os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return 0.0
    return until if until > time.time() else 0.0


def _counted(found: os.stat_result) -> int:
    return form.counted_bytes(found.st_size) if stat.S_ISREG(found.st_mode) else 0
