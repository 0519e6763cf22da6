"""The form of the file: its tables, the opening of connections, and the refusal of other files.

Values stand apart from their metadata: SQLite rewrites a whole row, so a touch would write its value too. Triggers keep
the sum of all sizes, so it is right for every writer, even one that was killed.
"""

from __future__ import annotations

import os
import sqlite3
import time

from kvframework.errors import ConfigFieldError

# "KVFs" and the version of the form, in the file's header.
_APPLICATION_ID = 0x4B564673
_VERSION = 1
_PAGE_BYTES = 16 << 10
# SQLite's own wait for another writer; a longer wait is a loop of such waits, so that deadlines are checked.
BUSY_S = 0.02
_OPEN_S = 10.0
_JOURNAL_BYTES = 64 << 20

_TABLES = """
CREATE TABLE entries (
    key BLOB PRIMARY KEY, id INTEGER NOT NULL, nbytes INTEGER NOT NULL, used_at REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX by_use ON entries (used_at);
CREATE TABLE contents (id INTEGER PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE total (nbytes INTEGER NOT NULL);
INSERT INTO total VALUES (0);
CREATE TRIGGER added AFTER INSERT ON entries BEGIN
    UPDATE total SET nbytes = nbytes + NEW.nbytes;
END;
CREATE TRIGGER removed AFTER DELETE ON entries BEGIN
    UPDATE total SET nbytes = nbytes - OLD.nbytes;
    DELETE FROM contents WHERE id = OLD.id;
END;
"""


def connect(path: str, sync: str) -> sqlite3.Connection:
    """A connection for one call at a time, of any thread, that begins its transactions itself. Raises
    `sqlite3.Error`."""
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute(f"PRAGMA synchronous = {sync}")
        connection.execute(f"PRAGMA journal_size_limit = {_JOURNAL_BYTES}")
    except BaseException:
        connection.close()
        raise
    return connection


def prepare(path: str, sync: str, *, where: str) -> None:
    """Creates the file if it is missing, and checks that it is one of this tier. Several servers may do it at once.

    Raises `ConfigFieldError`.
    """
    deadline = time.monotonic() + _OPEN_S
    try:
        # Values are private; the journal beside the file gets its mode.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        while True:
            try:
                _prepare(path, sync, where)
                return
            except sqlite3.OperationalError as error:
                if not is_busy(error) or time.monotonic() >= deadline:
                    raise
                time.sleep(BUSY_S)
    except (OSError, sqlite3.Error) as error:
        raise ConfigFieldError(
            f"{path} cannot be used: {error}",
            where=where,
            hint="name a file on a local disk, in a folder that the server's user may write to",
        ) from error


def _prepare(path: str, sync: str, where: str) -> None:
    connection = connect(path, sync)
    try:
        if _is_empty(connection):
            connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise sqlite3.NotSupportedError("its file system has no memory that processes share")
            connection.execute("BEGIN IMMEDIATE")
            if _is_empty(connection):
                for statement in _statements():
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {_VERSION}")
            connection.execute("COMMIT")
        (application_id,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    finally:
        connection.close()
    if (application_id, version) != (_APPLICATION_ID, _VERSION):
        raise ConfigFieldError(
            f"{path} is a database of something else, or of another release",
            where=where,
            hint="give a path where there is no file yet",
        )


def is_busy(error: sqlite3.Error) -> bool:
    """True if another connection is in the way, so that a retry makes sense. Python 3.10 does not give the error's
    code."""
    return "locked" in str(error) or "busy" in str(error)


def is_full(error: sqlite3.Error) -> bool:
    """True if the value did not fit: the disk is full, the value is larger than SQLite allows, or the system refused to
    write it, as beyond a quota or a limit of the file's size (Python 3.10 does not say which error of the disk it was).
    """
    refused = getattr(error, "sqlite_errorname", "SQLITE_IOERR_WRITE") == "SQLITE_IOERR_WRITE"
    return "is full" in str(error) or "too big" in str(error) or (refused and "disk I/O error" in str(error))


def _is_empty(connection: sqlite3.Connection) -> bool:
    (count,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return not count


def _statements() -> list[str]:
    """The statements that create the tables, one by one: `executescript` would end the transaction."""
    statements, held = [], ""
    for line in _TABLES.strip().splitlines():
        held += line + "\n"
        if sqlite3.complete_statement(held):
            statements.append(held)
            held = ""
    return statements
