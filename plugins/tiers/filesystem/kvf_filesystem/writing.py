"""Writing, touching and removal of one object's file, and its bytes in the ledger. A value is written to a temporary
file beside its place, which is then renamed. Runs in the caller's storage thread."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Sequence

from kvf_filesystem import form
from kvf_filesystem.ledger import Ledger, Limit
from kvf_filesystem.reading import align, move
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
            replaced = _bytes_at(fd, name)
            if not self._ledger.replace(folder, nbytes, replaced):
                return False
            try:
                _rename(fd, temporary, name)
            except OSError as error:
                self._ledger.change(folder, replaced - nbytes)
                # ENOENT: the temporary file was swept, or the folder removed.
                if error.errno in (errno.ENOENT, *_NOT_EMPTY) or root.spared_by(error, folder):
                    return False
                raise
        return True


def touch(root: Root, key: PackedKey) -> None:
    """Set the time of the file, unless it has a second name, which may be outside of the folder. Raises `OSError`."""
    folder, name = form.place_of(key)
    with contextlib.suppress(FileNotFoundError):
        fd = root.folders.at(folder)
        found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
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


def _counted(found: os.stat_result) -> int:
    return form.counted_bytes(found.st_size) if stat.S_ISREG(found.st_mode) else 0
