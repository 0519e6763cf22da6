"""The connections to the file: their use, their limits and their end. Called in the storage threads."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kvf_sqlite.limit import Limit
from kvf_sqlite.schema import connect, is_busy
from kvframework.errors import TierError

T = TypeVar("T")
Work = Callable[[sqlite3.Connection, Limit], T]

# SQLite asks whether to go on after this many steps of its virtual machine: some microseconds.
_STEPS = 1000
# SQLite reports some conflicts with other connections at once, without its own wait.
_PAUSE_S = 0.001


class Connections:
    """One connection for each call in progress, kept for the next one. Thread-safe.

    SQLite has one writer at a time: writers of this process wait for each other by a lock, which wakes them at once; a
    conflict with those of other processes is retried until the call's limit.
    """

    def __init__(self, path: str, sync: str) -> None:
        self._path = path
        self._sync = sync
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._lent: set[sqlite3.Connection] = set()
        self.closed = False

    def read(self, limit: Limit, work: Work[T]) -> T:
        """The result of `work`; each of its statements sees one state of the file. `work` may run again from its
        beginning."""
        with self._borrow(limit) as connection:
            return _patiently(limit, lambda: work(connection, limit))

    def write(self, limit: Limit, work: Work[T]) -> T:
        """The result of `work`, in a transaction: all of it happens, or nothing if it raises. `work` checks the limit
        between its statements; SQLite does so in the middle of a long one."""
        if not self._writing.acquire(timeout=limit.remaining()):
            raise TierError("the call's deadline has passed")
        try:
            with self._borrow(limit) as connection:
                return _patiently(limit, lambda: _in_transaction(connection, limit, work))
        finally:
            self._writing.release()

    def close(self) -> None:
        """Ends calls in progress, which fail, and closes every idle connection; the others are closed when their calls
        end. Idempotent; does not wait."""
        with self._lock:
            self.closed = True
            idle, self._idle = self._idle, []
            for connection in self._lent:
                connection.interrupt()
        for connection in idle:
            connection.close()

    @contextmanager
    def _borrow(self, limit: Limit) -> Iterator[sqlite3.Connection]:
        limit.check()
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = connect(self._path, self._sync)
        connection.set_progress_handler(limit.passed, _STEPS)
        with self._lock:
            self._lent.add(connection)
        try:
            yield connection
        finally:
            connection.set_progress_handler(None, 0)
            with self._lock:
                self._lent.discard(connection)
                kept = not self.closed
                if kept:
                    self._idle.append(connection)
            if not kept:
                connection.close()


def _in_transaction(connection: sqlite3.Connection, limit: Limit, work: Work[T]) -> T:
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = work(connection, limit)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.set_progress_handler(None, 0)
            connection.execute("ROLLBACK")
        raise
    return result


def _patiently(limit: Limit, work: Callable[[], T]) -> T:
    """Repeats `work` while another connection is in the way."""
    while True:
        limit.check()
        try:
            return work()
        except sqlite3.OperationalError as error:
            if not is_busy(error):
                raise
        time.sleep(_PAUSE_S)
