"""The shared state of all processes on a simulated node: allocations, mappings, events, queued work; and the errors of
its runtime, as a vendor's library has its own.

One SQLite file in the node's directory, so that a process killed at any moment leaves it whole. Every call is short and
takes the file's lock; thread-safe.
"""

from __future__ import annotations

import array
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class AcceleratorError(RuntimeError):
    """One call or one operation failed."""


class Misuse(AcceleratorError):
    """A mistake that a device would let pass, with wrong bytes as the likely result. Also noted on the node, see
    `SimulatedNode.violations`. `kind` is a short stable name."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class ContextLost(AcceleratorError):
    """This process's context is poisoned, or the device has vanished: every further call fails."""


FILE = "ledger.sqlite"
_SCHEMA = """
create table settings(name text primary key, value text);
create table devices(uuid text primary key, number integer, nbytes integer, vanished integer default 0);
create table processes(id integer primary key, pid integer, started text);
create table allocations(id integer primary key, device text, process integer, start integer, nbytes integer,
                         token blob, freed integer default 0);
create table mappings(id integer primary key, allocation integer, process integer);
create table events(id integer primary key, device text, process integer, token blob, recorded integer default 0,
                    reached integer default 0, destroyed integer default 0, error text default '');
create table openings(id integer primary key, event integer, process integer);
create table streams(id integer primary key, process integer);
create table queued(id integer primary key, device text, process integer, stream integer, writes integer, what text,
                    spans blob);
create table faults(id integer primary key, kind text, device text, remaining integer, hits integer default 0);
create table violations(id integer primary key, process integer, kind text, text text);
"""
# Sorted, without overlaps: (first byte, byte after the last) in a device's memory.
Spans = Sequence[tuple[int, int]]


class Ledger:
    """One process's connection to the file."""

    def __init__(self, directory: Path) -> None:
        self._lock = threading.RLock()
        self._file = sqlite3.connect(
            directory / FILE, timeout=20.0, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        self._file.execute("pragma synchronous = off")

    @classmethod
    def create(cls, directory: Path) -> Ledger:
        """Create a new, empty ledger."""
        with sqlite3.connect(directory / FILE) as file:
            file.execute("pragma journal_mode = wal")
            file.executescript(_SCHEMA)
        file.close()
        return cls(directory)

    def close(self) -> None:
        with self._lock:
            self._file.close()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Make the changes within the block visible as one."""
        with self._lock:
            self._file.execute("begin immediate")
            try:
                yield
            except BaseException:
                self._file.execute("rollback")
                raise
            self._file.execute("commit")

    def all(self, query: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        with self._lock:
            return self._file.execute(query, values).fetchall()

    def one(self, query: str, *values: object) -> tuple | None:  # type: ignore[type-arg]
        with self._lock:
            found: tuple | None = self._file.execute(query, values).fetchone()  # type: ignore[type-arg]
            return found

    def insert(self, statement: str, *values: object) -> int:
        """Return the new row's id."""
        with self._lock:
            return int(self._file.execute(statement, values).lastrowid or 0)

    def run(self, statement: str, *values: object) -> int:
        """Return the number of rows changed."""
        with self._lock:
            return self._file.execute(statement, values).rowcount

    # processes

    def enter(self) -> int:
        """Add this process; return its number on the node."""
        return self.insert("insert into processes(pid, started) values(?, ?)", os.getpid(), _started(os.getpid()))

    def lives(self, process: int) -> bool:
        row = self.one("select pid, started from processes where id = ?", process)
        return row is not None and _started(row[0]) == row[1] != ""

    # work that is queued

    def queue(self, device: str, process: int, stream: int, *, writes: bool, what: str, spans: Spans) -> int:
        flat = array.array("Q", [edge for span in spans for edge in span])
        return self.insert(
            "insert into queued(device, process, stream, writes, what, spans) values(?, ?, ?, ?, ?, ?)",
            device,
            process,
            stream,
            int(writes),
            what,
            flat.tobytes(),
        )

    def finished(self, queued: int) -> None:
        self.run("delete from queued where id = ?", queued)

    def conflict(self, queued: int) -> str:
        """Return the earlier work of another process that is not done and touches the same bytes, one of the two
        writing; "" if there is none."""
        mine = self.one("select device, process, stream, writes, spans from queued where id = ?", queued)
        if mine is None:
            return ""
        device, process, stream, writes, spans = mine
        rows = self.all(
            "select process, what, spans from queued where id < ? and device = ? and (process != ? or stream != ?)"
            " and (writes or ?)",
            queued,
            device,
            process,
            stream,
            writes,
        )
        for other, what, others in rows:
            if _touch(spans, others) and self.lives(other):
                return f"{what} of process {other}"
        return ""

    # faults and violations

    def take_fault(self, kind: str, device: str) -> bool:
        """Return whether such a fault happens now; each of the `count` injected ones is used up by that."""
        if self.one("select id from faults where kind = ? and device = ? and remaining > 0", kind, device) is None:
            return False
        with self.change():
            return bool(
                self.run(
                    "update faults set remaining = remaining - 1, hits = hits + 1 where id ="
                    " (select id from faults where kind = ? and device = ? and remaining > 0 limit 1)",
                    kind,
                    device,
                )
            )

    def violated(self, process: int, kind: str, text: str) -> None:
        self.insert("insert into violations(process, kind, text) values(?, ?, ?)", process, kind, text)


def merged(spans: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans sorted, with neighbours joined."""
    result: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if result and low <= result[-1][1]:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    return result


def _touch(one: bytes, other: bytes) -> bool:
    a, b = array.array("Q", one), array.array("Q", other)
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i + 1] <= b[j]:
            i += 2
        elif b[j + 1] <= a[i]:
            j += 2
        else:
            return True
    return False


def _started(pid: int) -> str:
    """Return when a process began; "" if it has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
