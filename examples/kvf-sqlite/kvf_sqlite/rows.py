"""The statements on single values. Called with a connection that no other thread uses meanwhile; writing statements in
a transaction."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence

from kvf_sqlite.limit import Limit
from kvframework.api.tier import Outcome, PackedKey


def look(connection: sqlite3.Connection, key: PackedKey, limit: Limit) -> Outcome:
    limit.check()
    found = connection.execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchone()
    return Outcome.FOUND if found else Outcome.MISSING


def load(connection: sqlite3.Connection, key: PackedKey, into: Sequence[memoryview], limit: Limit) -> int | Outcome:
    limit.check()
    room = sum(part.nbytes for part in into)
    # One statement, so that no other writer comes between size and value; a value that is too long is not read.
    found = connection.execute(
        "SELECT CASE WHEN nbytes <= ? THEN (SELECT value FROM contents WHERE contents.id = entries.id) END"
        " FROM entries WHERE key = ?",
        (room, key),
    ).fetchone()
    if found is None:
        return Outcome.MISSING
    if found[0] is None:
        return Outcome.DAMAGED
    value = rest = memoryview(found[0])
    for part in into:
        piece, rest = rest[: part.nbytes], rest[part.nbytes :]
        part.cast("B")[: piece.nbytes] = piece
    return value.nbytes


def total(connection: sqlite3.Connection) -> int:
    (nbytes,) = connection.execute("SELECT nbytes FROM total").fetchone()
    return int(nbytes)


def remove(connection: sqlite3.Connection, key: PackedKey, limit: Limit) -> Outcome:
    limit.check()
    found = connection.execute("DELETE FROM entries WHERE key = ?", (key,)).rowcount
    return Outcome.DELETED if found else Outcome.MISSING


def insert(connection: sqlite3.Connection, key: PackedKey, value: bytes) -> None:
    """Stores a value under a new key."""
    stored = connection.execute("INSERT INTO contents (value) VALUES (?)", (value,)).lastrowid
    row = key, stored, len(value), time.time()
    connection.execute("INSERT INTO entries (key, id, nbytes, used_at) VALUES (?, ?, ?, ?)", row)


def make_room(connection: sqlite3.Connection, nbytes: int, limit: Limit) -> None:
    """Deletes the least recently used values, until they were `nbytes` bytes or none is left."""
    while nbytes > 0:
        oldest = connection.execute("SELECT key, nbytes FROM entries ORDER BY used_at LIMIT 1").fetchone()
        if oldest is None:
            return
        remove(connection, oldest[0], limit)
        nbytes -= oldest[1]
