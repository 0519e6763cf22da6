"""The open folder that all calls share: after `close` no new call gets it, and the last call to end closes it.

Thread-safe. A descriptor that was closed under a call could name another file by then, so none ever is.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvf_filesystem.ledger import CLOSED
from kvf_filesystem.root import Root
from kvframework.errors import ConfigFieldError, TierError


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
