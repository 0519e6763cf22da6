"""Descriptors of a root's fan-out folders. Files are opened through them, so no link in place of a folder is followed.

A descriptor is kept while it names the folder in its place. A hit needs no system call to know that: making, removing
or replacing a folder changes the ctime of the root, which every call of the tier reads anyway.
"""

from __future__ import annotations

import os
import threading
import time

from kvf_filesystem.form import FOLDERS, folder_name

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Two changes within one tick of the file system's clock leave the same time.
_TICK_NS = 100_000_000


class Folders:
    """Thread-safe. Borrows the root's descriptor; owns those of the folders, at most 256, until `close`.

    The descriptor of a folder keeps its number: where the folder was made again, that names the new one from then on.
    A call of another thread never finds it closed, or naming something else.
    """

    def __init__(self, root_fd: int) -> None:
        self._root_fd = root_fd
        self._fds = [-1] * FOLDERS
        self._inodes = [(0, 0)] * FOLDERS
        self._lock = threading.Lock()  # never held over a system call
        self._opening = threading.Lock()
        # The number of the last change of the root, and that at which each folder was found in its place.
        self._change = 1
        self._found_at = [0] * FOLDERS
        self._changed_ns = 0

    def seen(self, root: os.stat_result) -> None:
        """Takes note of the status of the root, as of now."""
        if root.st_ctime_ns != self._changed_ns or time.time_ns() - root.st_ctime_ns < _TICK_NS:
            with self._lock:
                self._changed_ns = root.st_ctime_ns
                self._change += 1

    def at(self, folder: int) -> int:
        """The descriptor of the folder, as of the last `seen`. Raises `OSError`: `FileNotFoundError` if there is none,
        `NotADirectoryError` for a link or a file in its place."""
        return self._fds[folder] if self._found_at[folder] == self._change else self.now(folder)

    def now(self, folder: int) -> int:
        """Like `at`, as of now: before a change, which must not be made in a folder that was moved away."""
        name, change = folder_name(folder), self._change
        if self._fds[folder] < 0 or self._inodes[folder] != _inode(
            os.stat(name, dir_fd=self._root_fd, follow_symlinks=False)
        ):
            self._open(folder, name)
        self._found_at[folder] = change
        return self._fds[folder]

    def close(self) -> None:
        for fd in self._fds:
            if fd >= 0:
                os.close(fd)

    def _open(self, folder: int, name: str) -> None:
        # One at a time, so that no slow thread puts back a folder that was replaced meanwhile.
        with self._opening:
            fd = os.open(name, FOLDER_FLAGS, dir_fd=self._root_fd)
            inode = _inode(os.fstat(fd))
            if self._fds[folder] < 0:
                self._fds[folder] = fd
            else:
                os.dup2(fd, self._fds[folder], inheritable=False)
                os.close(fd)
            self._inodes[folder] = inode


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
