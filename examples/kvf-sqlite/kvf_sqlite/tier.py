"""The SQLite tier: batches over single values, and the handling of SQLite's errors. Runs in the caller's storage
thread."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvf_sqlite.connections import Connections
from kvf_sqlite.limit import Limit
from kvf_sqlite.options import SqliteOptions
from kvf_sqlite.rows import insert, load, look, make_room, remove, total
from kvf_sqlite.schema import is_full, prepare
from kvframework.api.tier import Outcome, PackedKey, Tier, TierEntry, TierUsage
from kvframework.errors import TierError

T = TypeVar("T")

_LISTED_AT_ONCE = 500


def open_tier(options: SqliteOptions, *, where: str) -> Tier:
    """The tier; opens its file, or creates it. Raises `ConfigFieldError`."""
    prepare(options.path, options.sync, where=where)
    return SqliteTier(options, where=where)


class SqliteTier(Tier):
    """A row per value in one file. Thread-safe, and several servers may use one file.

    Each value is a transaction of its own: readers see it whole or not at all, also after a crash, and a call waits for
    another one no longer than a value takes. A full store makes room by deleting the values that were stored or touched
    longest ago.
    """

    name = "sqlite"

    def __init__(self, options: SqliteOptions, *, where: str) -> None:
        self._where = f"{where}: {options.path}"
        self._capacity = options.capacity
        self._connections = Connections(options.path, options.sync)

    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        def each(connection: sqlite3.Connection, limit: Limit) -> list[Outcome]:
            return [look(connection, key, limit) for key in keys]

        return self._run(lambda limit: self._connections.read(limit, each), deadline)

    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        def each(connection: sqlite3.Connection, limit: Limit) -> list[int | Outcome]:
            return [load(connection, key, into, limit) for key, into in zip(keys, parts, strict=True)]

        return self._run(lambda limit: self._connections.read(limit, each), deadline)

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        """FAILED for a value that is larger than the capacity, or than the disk has room for."""

        def store(limit: Limit) -> list[Outcome]:
            limit.check()  # an empty batch writes nothing that would
            return [self._store(key, b"".join(pieces), limit) for key, pieces in zip(keys, parts, strict=True)]

        return self._run(store, deadline)

    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        def each(connection: sqlite3.Connection, limit: Limit) -> list[Outcome]:
            return [remove(connection, key, limit) for key in keys]

        return self._run(lambda limit: self._connections.write(limit, each), deadline)

    def touch(self, keys: Sequence[PackedKey], *, deadline: float) -> None:
        def each(connection: sqlite3.Connection, limit: Limit) -> None:
            now = time.time()
            for key in keys:
                limit.check()
                connection.execute("UPDATE entries SET used_at = ? WHERE key = ?", (now, key))

        self._run(lambda limit: self._connections.write(limit, each), deadline)

    def usage(self, *, deadline: float) -> TierUsage:
        def measure(connection: sqlite3.Connection, _limit: Limit) -> int:
            return total(connection)

        return TierUsage(self._run(lambda limit: self._connections.read(limit, measure), deadline), self._capacity)

    def scan(self, *, deadline: float) -> Iterator[TierEntry]:
        """Lists in the order of keys, some hundred at a time; between them the tier keeps nothing open."""
        rows = self._page(b"", deadline)
        while rows:
            for key, nbytes, used_at in rows:
                yield TierEntry(key, nbytes, used_at)
            rows = self._page(rows[-1][0], deadline)

    def close(self) -> None:
        """Does not wait: calls in flight are interrupted and fail."""
        self._connections.close()

    def _page(self, after: PackedKey, deadline: float) -> list[tuple[PackedKey, int, float]]:
        def read(connection: sqlite3.Connection, _limit: Limit) -> list[tuple[PackedKey, int, float]]:
            statement = "SELECT key, nbytes, used_at FROM entries WHERE key > ? ORDER BY key LIMIT ?"
            return connection.execute(statement, (after, _LISTED_AT_ONCE)).fetchall()

        return self._run(lambda limit: self._connections.read(limit, read), deadline)

    def _store(self, key: PackedKey, value: bytes, limit: Limit) -> Outcome:
        if len(value) > self._capacity:
            return Outcome.FAILED

        def write(connection: sqlite3.Connection, limit: Limit) -> None:
            remove(connection, key, limit)
            make_room(connection, total(connection) + len(value) - self._capacity, limit)
            insert(connection, key, value)

        try:
            self._connections.write(limit, write)
        except OverflowError:
            return Outcome.FAILED
        except sqlite3.Error as error:
            if not is_full(error):
                raise
            return Outcome.FAILED
        return Outcome.STORED

    def _run(self, work: Callable[[Limit], T], deadline: float) -> T:
        """Calls `work` within the deadline. The error of a failure has no context, whose frames would keep the caller's
        buffers."""
        limit = Limit(deadline, lambda: self._connections.closed)
        try:
            return work(limit)
        except TierError as error:
            fact, hint = error.fact, error.hint
        except sqlite3.Error as error:
            fact, hint = str(error), _hint(str(error))
        if limit.passed():
            # SQLite reports an interruption in several ways.
            fact, hint = ("the tier is closed" if self._connections.closed else "the call's deadline has passed"), ""
        raise TierError(fact, where=self._where, hint=hint)


def _hint(fact: str) -> str:
    """One remedy for an error of SQLite."""
    if "malformed" in fact or "not a database" in fact:
        return "the file is damaged: stop the servers that use it, move it away, start them again"
    if "readonly" in fact or "unable to open" in fact:
        return "the server's user needs to read and write the file and its folder"
    if "disk I/O" in fact:
        return "the disk fails: see the kernel's log"
    return ""
