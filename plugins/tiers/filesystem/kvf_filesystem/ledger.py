"""The bytes of values in the folder, reservations for new ones, the limit of one call, and the thread that counts.

The bytes are kept by fan-out folder. Changes to a folder that is not counted yet are passed over: the count will
include them. A thread that changes or counts files holds the folder's lock meanwhile, so the sums are exact as long as
no other server uses the folder. Thread-safe.

The open folder that all calls share: after `close` no new call gets it, and the last call to end closes it.

Thread-safe. A descriptor that was closed under a call could name another file by then, so none ever is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvf_filesystem.form import counted_bytes, folder_name, key_of, token_of
from kvf_filesystem.root import FOLDER_FLAGS, Root
from kvframework.api.tier import TierEntry
from kvframework.errors import ConfigFieldError, TierError

CLOSED = "the tier is closed"
_TOO_LATE = "the call's deadline has passed"


class Limit:
    """The limit of one call; checked between files and between slices of a large one."""

    def __init__(self, deadline: float, closed: Callable[[], bool]) -> None:
        self._deadline = deadline
        self._closed = closed

    def check(self) -> None:
        """Raise `TierError` if the call must end."""
        if self._closed():
            raise TierError(CLOSED)
        if time.monotonic() >= self._deadline:
            raise TierError(_TOO_LATE)

    def remaining(self) -> float:
        """Seconds until the deadline, at least 0, at most the longest timeout of a lock."""
        return min(max(self._deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)

    @contextmanager
    def holding(self, lock: threading.Lock) -> Iterator[None]:
        """Holds `lock` in the block. Raises `TierError` if it is not free before the deadline."""
        if not lock.acquire(timeout=self.remaining()):
            raise TierError(_TOO_LATE)
        try:
            yield
        finally:
            lock.release()


class Ledger:
    """Bytes used and reserved. `capacity` bounds the sum of `used` and the values being written."""

    def __init__(self, capacity: int, folders: int) -> None:
        self.capacity = capacity
        self.locks = [threading.Lock() for _ in range(folders)]
        self._by_folder: list[int | None] = [None] * folders
        self._used = 0
        self._reserved = 0
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes of values, as far as they are counted."""
        return self._used

    def reserve(self, nbytes: int, replaced: int) -> bool:
        """Reserve room for a value of `nbytes` that is about to replace one of `replaced`; False if there is none.
        After True the caller calls `release`."""
        with self._lock:
            if self._used + self._reserved + nbytes - replaced > self.capacity:
                return False
            self._reserved += nbytes
            return True

    def release(self, nbytes: int) -> None:
        with self._lock:
            self._reserved -= nbytes

    def replace(self, folder: int, nbytes: int, replaced: int) -> bool:
        """Books a value whose room is reserved; False if the value that it replaces turns out smaller, and others have
        taken the room."""
        with self._lock:
            if self._used + self._reserved - replaced > self.capacity:
                return False
            self._change(folder, nbytes - replaced)
            return True

    def change(self, folder: int, difference: int) -> None:
        """Books added or, below 0, removed bytes."""
        with self._lock:
            self._change(folder, difference)

    def recount(self, folder: int, nbytes: int) -> None:
        """Books that `folder` holds `nbytes`, replacing the earlier count."""
        with self._lock:
            self._used += nbytes - (self._by_folder[folder] or 0)
            self._by_folder[folder] = nbytes

    def _change(self, folder: int, difference: int) -> None:
        held = self._by_folder[folder]
        if held is not None:
            difference = max(difference, -held)  # other servers may have removed and added files
            self._by_folder[folder] = held + difference
            self._used += difference


_log = logging.getLogger(__name__)

RETRY_S = 5.0


class Counting:
    """The thread that counts the bytes, until `close`.

    It calls `count` until that succeeds, then after each `again` and every `every_s` seconds (None: never).

    `count` may raise `OSError`. Thread-safe.
    """

    def __init__(self, count: Callable[[], None], *, every_s: float | None, where: str) -> None:
        self._count = count
        self._every_s = every_s
        self._where = where
        self._changed = threading.Condition()
        self._counted = False
        self._wanted = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvf-filesystem", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Blocks until the first count is complete, for at most `seconds` and not beyond `close`; True if it is
        complete."""
        with self._changed:
            self._changed.wait_for(lambda: self._counted or self._closed, seconds)
            return self._counted

    def again(self) -> None:
        with self._changed:
            self._wanted = True
            self._changed.notify_all()

    def close(self, seconds: float) -> None:
        """End the thread; wait at most `seconds` for its current step. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        logged = ""
        while not self._closed:
            pause, self._wanted = self._every_s, False
            try:
                self._count()
            except OSError as error:
                pause = RETRY_S
                fact = error.fact if isinstance(error, TierError) else error.strerror or type(error).__name__
                if fact != logged and not self._closed:
                    _log.warning("%s: the bytes in the folder cannot be counted: %s", self._where, fact)
                logged = fact
            else:
                logged = ""
                with self._changed:
                    self._counted = True
                    self._changed.notify_all()
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closed, pause)


# In a shared folder, a temporary file without a write for this long has no writer.
_DEAD_AFTER_S = 3600.0


class Lister:
    """Lists folders and books their bytes. Thread-safe. Names that are not this tier's are passed over."""

    def __init__(self, ledger: Ledger, *, shared: bool, token: str) -> None:
        self._ledger = ledger
        self._shared = shared
        self._token = token

    def entries(self, root: Root, limit: Limit, *, folder: int) -> list[TierEntry]:
        """Every value in `folder`. Raises `OSError` and the errors of `limit`."""
        # A lock does not keep other servers out of a shared folder, so there it would only cost.
        with contextlib.nullcontext() if self._shared else limit.holding(self._ledger.locks[folder]):
            entries = self._listed(root, folder, limit)
            self._ledger.recount(folder, sum(entry.nbytes for entry in entries))
        return entries

    def _listed(self, root: Root, folder: int, limit: Limit) -> list[TierEntry]:
        entries = []
        try:
            # One of its own: those that share a descriptor share the place in its list, too.
            fd = os.open(folder_name(folder), FOLDER_FLAGS, dir_fd=root.fd)
        except (FileNotFoundError, NotADirectoryError):  # the latter for a link, too
            return []
        try:
            with os.scandir(fd) as found:
                for number, each in enumerate(found):
                    if number % 256 == 0:
                        limit.check()
                    key, token = key_of(folder, each.name), token_of(each.name)
                    if key is None and token in (None, self._token):
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        status = each.stat(follow_symlinks=False)
                        if key is not None and stat.S_ISREG(status.st_mode):
                            entries.append(TierEntry(key, counted_bytes(status.st_size), status.st_mtime))
                        elif token is not None and self._is_dead(status):
                            os.unlink(each.name, dir_fd=fd)
        finally:
            os.close(fd)
        return entries

    def _is_dead(self, status: os.stat_result) -> bool:
        return not self._shared or time.time() - status.st_mtime > _DEAD_AFTER_S


class SharedRoot:
    """A folder, open while calls use it: `root` first; after a loss, the one that `open_again` opens."""

    def __init__(self, root: Root, open_again: Callable[[], Root], *, where: str) -> None:
        self._root: Root | None = root
        self._open_again = open_again
        self._where = where
        self._users: Counter[int] = Counter()
        self._lock = threading.Lock()  # never held over a system call that may hang
        self._opening = threading.Lock()
        self.closed = False

    @contextmanager
    def borrow(self) -> Iterator[Root]:
        """The folder, open until the block ends. Raises `TierError` once closed, or if the folder was removed and
        cannot be opened again; `OSError` if its state cannot be read."""
        root = self._enter_standing()
        try:
            yield root
        finally:
            self._leave(root)

    def lost(self, root: Root) -> None:
        with self._lock:
            if self._root is root:
                self._root = None
                self._close_if_unused(root)

    def close(self) -> None:
        """Refuse further calls. Never blocks. Idempotent."""
        with self._lock:
            self.closed = True
            root, self._root = self._root, None
            if root is not None:
                self._close_if_unused(root)

    def _enter_standing(self) -> Root:
        root = self._enter()
        try:
            if not root.gone():
                return root
        except OSError:
            self.lost(root)
            self._leave(root)
            raise
        self.lost(root)
        self._leave(root)
        return self._enter()

    def _enter(self) -> Root:
        root = self._entered()
        if root is not None:
            return root
        with self._opening:
            root = self._entered()
            if root is None:
                root = self._opened_again()
                with self._lock:
                    self._users[root.fd] += 1
                    if not self.closed:
                        self._root = root
            return root

    def _entered(self) -> Root | None:
        with self._lock:
            if self.closed:
                raise TierError(CLOSED, where=self._where)
            if self._root is not None:
                self._users[self._root.fd] += 1
            return self._root

    def _leave(self, root: Root) -> None:
        with self._lock:
            self._users[root.fd] -= 1
            if root is not self._root:
                self._close_if_unused(root)

    def _close_if_unused(self, root: Root) -> None:
        if not self._users[root.fd]:
            del self._users[root.fd]
            root.close()

    def _opened_again(self) -> Root:
        try:
            return self._open_again()
        except ConfigFieldError as error:
            fact, hint = error.fact, error.hint
        raise TierError(
            f"the file server lost the folder, which cannot be opened again: {fact}", where=self._where, hint=hint
        )
