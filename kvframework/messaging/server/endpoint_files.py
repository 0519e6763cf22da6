"""The files of an `ipc://` endpoint: its socket, its liveness socket, and the lock that reserves it for one server.

Runs in the server process. An flock decides which process holds the endpoint; no crash can leave it behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from kvframework.config import FULL_SUFFIX, LIVENESS_SUFFIX, check_directory, ipc_path, prepare_private_directory
from kvframework.errors import EndpointError
from kvframework.messaging.fork import close_after_fork

LOCK_SUFFIX = ".lock"
_CONNECT_S = 1.0


@contextlib.contextmanager
def socket_umask(shared: bool = False) -> Iterator[None]:
    """Files and sockets made within the block are for their owner only, or, if `shared`, for whom their directory and
    the server let in (of the whole process, so keep it short)."""
    before = os.umask(0o111 if shared else 0o177)
    try:
        yield
    finally:
        os.umask(before)


class EndpointFiles:
    """The files of one endpoint while this process holds it; `release()` removes them. `shared`: other users may reach
    the sockets, and the server decides whom it serves."""

    def __init__(self, endpoint: str, *, shared: bool = False) -> None:
        self.endpoint = endpoint
        self.shared = shared
        self.path = ipc_path(endpoint)
        self.liveness = self.path + LIVENESS_SUFFIX
        self._full = self.path + FULL_SUFFIX
        self._lock_path = self.path + LOCK_SUFFIX
        self._lock = -1

    def check(self) -> None:
        """Refuse what `acquire` would refuse, and change nothing. A server that starts at this moment is not seen.
        Blocks for a second at most. Raises `EndpointError`."""
        check_directory(Path(self.path).parent, shared=self.shared)
        for path in (self.path, self.liveness, self._full):
            if os.path.lexists(path):
                self._check_socket(path)
        if any(_listens(path) for path in (self.path, self._full)):
            holder = ""
            with contextlib.suppress(OSError), open(self._lock_path, encoding="ascii", errors="replace") as lock:
                holder = lock.read(32)
            raise self._held(holder)

    def acquire(self) -> None:
        """Make the directory if it is absent, take the lock and remove stale sockets. Raises `EndpointError`, also for
        a directory that others may write to; the error names another process that holds the endpoint."""
        prepare_private_directory(Path(self.path).parent, shared=self.shared)
        try:
            self._lock = self._take_lock()
            for path in (self.path, self.liveness, self._full):
                self._remove_stale(path)
        except OSError as error:
            self._give_lock_back()
            raise EndpointError(f"{error.strerror}: {error.filename}", where=self.endpoint) from error
        except EndpointError:
            self._give_lock_back()
            raise
        close_after_fork(self)

    def show(self, shown: bool) -> None:
        """Make the socket visible to clients or hide it. Raises `OSError`."""
        os.rename(*((self._full, self.path) if shown else (self.path, self._full)))

    def release(self) -> None:
        """Remove the files, if this process held the endpoint, and release the lock. Idempotent."""
        if self._lock < 0:
            return
        for path in (self.path, self.liveness, self._full):
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._give_lock_back()

    def close_in_child(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take_lock(self) -> int:
        while True:
            with socket_umask():
                lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(lock, 32, 0).decode("ascii", "replace")
                os.close(lock)
                raise self._held(holder) from None
            if _is_same_file(lock, self._lock_path):
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
                return lock
            os.close(lock)  # the holder removed the file after it was opened here

    def _give_lock_back(self) -> None:
        if self._lock < 0:
            return
        with contextlib.suppress(OSError):
            os.unlink(self._lock_path)
        os.close(self._lock)
        self._lock = -1

    def _held(self, holder: str) -> EndpointError:
        return EndpointError(
            f"another server holds this endpoint, process {holder.strip() or 'unknown'}",
            where=self.endpoint,
            hint="stop it, or give this server another endpoint",
        )

    def _check_socket(self, path: str) -> None:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise EndpointError(f"{path} exists and is no socket", where=self.endpoint, hint="choose another path")

    def _remove_stale(self, path: str) -> None:
        try:
            self._check_socket(path)
            os.unlink(path)
        except FileNotFoundError:
            return


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def _is_same_file(fd: int, path: str) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)
