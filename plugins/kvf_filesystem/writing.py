"""Writing and removal of one object's file: a temporary file beside its place, then a rename; and its bytes in the
ledger. Runs in the caller's storage thread."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Sequence

from kvf_filesystem.aligned import align
from kvf_filesystem.form import (
    LARGE,
    counted_bytes,
    file_bytes,
    folder_name,
    folder_of,
    lead_bytes,
    pack_head,
    path_of,
    start_for,
    temporary_name,
)
from kvf_filesystem.ledger import Ledger
from kvf_filesystem.limit import Limit
from kvf_filesystem.moving import move
from kvf_filesystem.root import Root
from kvframework.api.tier import Outcome, PackedKey

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

    def store(self, root: Root, key: PackedKey, parts: Sequence[memoryview], limit: Limit) -> Outcome:
        """Writes the value of `parts` (of bytes, none empty): STORED, or FAILED if there is no room for it or its path
        cannot be replaced.

        Raises `OSError` for errors that do not concern this file alone, and the errors of `limit`; the temporary file
        is removed then.
        """
        nbytes = sum(part.nbytes for part in parts)
        if not self._ledger.reserve(nbytes, _bytes_at(root, path_of(key))):
            return Outcome.FAILED
        try:
            return self._write_and_publish(root, key, parts, nbytes, limit)
        except OSError as error:
            if error.errno in _FULL:
                return Outcome.FAILED
            raise
        finally:
            self._ledger.release(nbytes)

    def remove(self, root: Root, key: PackedKey, limit: Limit) -> Outcome:
        """Removes the file, or an empty folder in its place: DELETED, MISSING or FAILED. Raises `OSError` and
        `TierError`."""
        path, folder = path_of(key), folder_of(key)
        try:
            with limit.holding(self._ledger.locks[folder]):
                found = os.stat(path, dir_fd=root.fd, follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    os.rmdir(path, dir_fd=root.fd)
                else:
                    os.unlink(path, dir_fd=root.fd)
                self._ledger.change(folder, -_counted(found))
        except FileNotFoundError:
            return Outcome.MISSING
        except OSError as error:
            if error.errno in _NOT_EMPTY or root.spared_by(error, folder_name(folder)):
                return Outcome.FAILED
            raise
        return Outcome.DELETED

    def _write_and_publish(
        self, root: Root, key: PackedKey, parts: Sequence[memoryview], nbytes: int, limit: Limit
    ) -> Outcome:
        folder = folder_name(folder_of(key))
        temporary = f"{folder}/{temporary_name(self._token, next(self._numbers))}"
        fd = self._create(root, folder, temporary)
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
            published = self._publish(root, key, temporary, nbytes, limit)
        finally:
            if not published:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=root.fd)
        if self._syncs_names:
            _sync_folder(root, folder)
        return Outcome.STORED if published else Outcome.FAILED

    def _create(self, root: Root, folder: str, temporary: str) -> int:
        try:
            return os.open(temporary, _FLAGS, 0o600, dir_fd=root.fd)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700, dir_fd=root.fd)
        if self._syncs_names:
            _sync_folder(root, ".")
        return os.open(temporary, _FLAGS, 0o600, dir_fd=root.fd)

    def _publish(self, root: Root, key: PackedKey, temporary: str, nbytes: int, limit: Limit) -> bool:
        path, folder = path_of(key), folder_of(key)
        with limit.holding(self._ledger.locks[folder]):
            replaced = _bytes_at(root, path)
            if not self._ledger.replace(folder, nbytes, replaced):
                return False
            try:
                _rename(root, temporary, path)
            except OSError as error:
                self._ledger.change(folder, replaced - nbytes)
                # ENOENT: the temporary file was swept, or the folder removed.
                if error.errno in (errno.ENOENT, *_NOT_EMPTY) or root.spared_by(error, folder_name(folder)):
                    return False
                raise
        return True


def _write(fd: int, parts: Sequence[memoryview], nbytes: int, direct: bool, limit: Limit) -> None:
    aligned = align(parts, nbytes) if direct and nbytes >= LARGE else None
    if aligned is None or not aligned.write(fd, limit.check):
        start = start_for(nbytes, lead_bytes(parts))
        front = memoryview(pack_head(start, nbytes).ljust(start, b"\0"))
        whole = start + nbytes
        if move(os.pwritev, fd, [front, *parts], limit.check, enough=whole) < whole:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
    if nbytes >= LARGE:
        os.ftruncate(fd, file_bytes(nbytes))


def _rename(root: Root, temporary: str, path: str) -> None:
    try:
        os.rename(temporary, path, src_dir_fd=root.fd, dst_dir_fd=root.fd)
    except IsADirectoryError:
        os.rmdir(path, dir_fd=root.fd)
        os.rename(temporary, path, src_dir_fd=root.fd, dst_dir_fd=root.fd)


def _bytes_at(root: Root, path: str) -> int:
    try:
        return _counted(os.stat(path, dir_fd=root.fd, follow_symlinks=False))
    except FileNotFoundError:
        return 0


def _counted(found: os.stat_result) -> int:
    return counted_bytes(found.st_size) if stat.S_ISREG(found.st_mode) else 0


def _sync_folder(root: Root, folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root.fd)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
