"""A simulated node: its devices' memory and its ledger in one private directory, and the errors of its runtime.

The ledger is one SQLite file, so that a process killed at any moment leaves it whole. Every call is short and takes the
file's lock; thread-safe.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import uuid
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

# The variable by which a process finds its node, unless it is given one.
NODE_VARIABLE = "KVF_SIMULATED_NODE"

Fault = Literal["copy_fails", "poison", "hold"]
# "unordered", "never_recorded", "use_after_free", "use_after_close", "wrong_device", "wrong_process", "out_of_bounds",
# "not_pinned" or "leaked_context"
Mistake = str
_FILE = "ledger.sqlite"
_SCHEMA = """
create table devices(uuid text primary key, number integer, max_delay_s real, vanished integer default 0);
create table processes(id integer primary key, pid integer, started text);
create table allocations(id integer primary key, device text, process integer, start integer, nbytes integer,
                         token blob, freed integer default 0);
create table mappings(id integer primary key, allocation integer, process integer);
create table events(id integer primary key, device text, process integer, shared integer, token blob,
                    recorded integer default 0, reached integer default 0, destroyed integer default 0,
                    error text default '');
create table openings(id integer primary key, event integer, process integer);
create table streams(id integer primary key, process integer);
create table queued(id integer primary key, device text, process integer, stream integer, writes integer, what text,
                    spans blob);
create table faults(id integer primary key, kind text, device text, remaining integer, hits integer default 0,
                    released integer default 0);
create table violations(id integer primary key, kind text, text text, process integer);
"""
# Sorted, without overlaps: (first byte, byte after the last) in a device's memory.
Spans = Sequence[tuple[int, int]]


class AcceleratorError(RuntimeError):
    """One call or one operation failed."""


class Misuse(AcceleratorError):
    """A mistake that a device would let pass, with wrong bytes as the likely result; noted on the node, too."""

    def __init__(self, kind: Mistake, text: str) -> None:
        super().__init__(f"{kind}: {text}")


class ContextLost(AcceleratorError):
    """This process's context is poisoned, or the device has vanished: every further call fails."""


class Violation(NamedTuple):
    """A mistake that a real device would have hidden. `process` is the process's number on the node."""

    kind: Mistake
    text: str
    process: int


class Ledger:
    """One process's connection to the file."""

    def __init__(self, directory: Path) -> None:
        self._lock = threading.RLock()
        self._file = sqlite3.connect(
            directory / _FILE, timeout=20.0, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        self._file.execute("pragma synchronous = off")

    @classmethod
    def create(cls, directory: Path) -> Ledger:
        made = cls(directory)
        made._file.execute("pragma journal_mode = wal")
        made._file.executescript(_SCHEMA)
        return made

    def close(self) -> None:
        with self._lock:
            self._file.close()

    @contextmanager
    def change(self) -> Iterator[None]:
        with self._lock, self._file:
            self._file.execute("begin immediate")
            yield

    def all(self, statement: str, *values: object) -> list[Any]:
        with self._lock:
            return self._file.execute(statement, values).fetchall()

    def one(self, statement: str, *values: object) -> Any:
        return next(iter(self.all(statement, *values)), None)

    def insert(self, statement: str, *values: object) -> int:
        with self._lock:
            return int(self._file.execute(statement, values).lastrowid or 0)

    def enter(self) -> int:
        return self.insert("insert into processes(pid, started) values(?, ?)", os.getpid(), _started(os.getpid()))

    def lives(self, process: int) -> bool:
        row = self.one("select pid, started from processes where id = ?", process)
        return row is not None and _started(row[0]) == row[1] != ""

    def count(self, query: str) -> int:
        return sum(self.lives(process) for (process,) in self.all(query))

    def queue(self, device: str, process: int, stream: int, *, writes: bool, what: str, spans: Spans) -> int:
        edges = array("Q", chain.from_iterable(spans)).tobytes()
        return self.insert(
            "insert into queued values(null, ?, ?, ?, ?, ?, ?)", device, process, stream, writes, what, edges
        )

    def conflict(self, queued: int) -> str:
        """Return earlier unfinished work of another stream on the same bytes, one of them writing, or ""."""
        rows = self.all(
            "select other.process, other.what, mine.spans, other.spans from queued mine join queued other"
            " on mine.id = ? and other.id < mine.id and other.device = mine.device"
            " and (other.process, other.stream) != (mine.process, mine.stream) and (other.writes or mine.writes)",
            queued,
        )
        for process, what, mine, others in rows:
            spans = sorted(_pairs(mine) + _pairs(others))
            if any(end > start for (_, end), (start, _) in pairwise(spans)) and self.lives(process):
                return f"{what} of process {process}"
        return ""

    def take_fault(self, device: str) -> tuple[int, Fault] | None:
        """Return the row and the kind of a fault that happens now, and use one of it up."""
        if self.one("select 1 from faults where device = ? and remaining > 0", device) is None:
            return None
        taken: tuple[int, Fault] | None = self.one(
            "update faults set remaining = remaining - 1, hits = hits + 1 where id ="
            " (select id from faults where device = ? and remaining > 0 limit 1) returning id, kind",
            device,
        )
        return taken

    def misuse(self, process: int, kind: Mistake, text: str) -> Misuse:
        self.insert("insert into violations(kind, text, process) values(?, ?, ?)", kind, text, process)
        return Misuse(kind, text)


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    result: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if result and low <= result[-1][1]:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    return result


def _pairs(spans: bytes) -> list[tuple[int, int]]:
    edges = iter(array("Q", spans))
    return list(zip(edges, edges, strict=True))


def _started(pid: int) -> str:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


class SimulatedNode:
    """Creates devices in `directory` (created if missing, else empty) and watches over them. Each piece of queued work
    begins up to `max_delay_s` late. Close it after every process has ended."""

    def __init__(
        self, directory: str | Path, *, devices: int = 2, nbytes: int = 32 << 20, max_delay_s: float = 0.002
    ) -> None:
        self.path = Path(directory)
        self.path.mkdir(parents=True, exist_ok=True)
        self.devices: Sequence[str] = tuple(str(uuid.UUID(int=number + 1)) for number in range(devices))
        self._ledger = Ledger.create(self.path)
        for number, device in enumerate(self.devices):
            self._ledger.all("insert into devices values(?, ?, ?, 0)", device, number, max_delay_s)
            with (self.path / device).open("wb") as memory:
                memory.truncate(nbytes)

    @classmethod
    def attached(cls, directory: str | Path) -> SimulatedNode:
        """Return the node that was made in `directory`, for another observer."""
        node = cls.__new__(cls)
        node.path = Path(directory)
        node._ledger = Ledger(node.path)
        node.devices = tuple(device for (device,) in node._ledger.all("select uuid from devices order by number"))
        return node

    def __enter__(self) -> SimulatedNode:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close this process's view of the node; its memory and faults stay."""
        self._ledger.close()

    def inject(self, fault: Fault, device: str, *, count: int = 1) -> None:
        """Make the next `count` copies fail, poison the context of their process, or stop in the middle until
        `release`. Raises `ValueError` for an unknown fault or device."""
        if fault not in get_args(Fault) or device not in self.devices:
            raise ValueError(f"there is no fault {fault!r}, or no device {device!r}")
        self._ledger.insert("insert into faults(kind, device, remaining) values(?, ?, ?)", fault, device, count)

    def hits(self, fault: Fault) -> int:
        """Return how often the fault was met, in any process."""
        return sum(hits for (hits,) in self._ledger.all("select hits from faults where kind = ?", fault))

    def release(self) -> None:
        """End all remaining faults, and let held copies continue."""
        self._ledger.all("update faults set remaining = 0, released = 1")

    def vanish(self, device: str, *, back: bool = False) -> None:
        """Make every call on the device fail from now on, in every process, until it is `back`."""
        self._ledger.all("update devices set vanished = ? where uuid = ?", not back, device)

    def violations(self) -> list[Violation]:
        """Return all misuse so far, and the memory of dead processes that living ones still map."""
        found = [Violation(*row) for row in self._ledger.all("select kind, text, process from violations order by id")]
        rows = self._ledger.all(
            "select allocations.process, mappings.process from mappings join allocations on allocations.id = allocation"
        )
        return found + [
            Violation("leaked_context", f"memory of the dead process {owner} is mapped by process {user}", user)
            for owner, user in rows
            if not self._ledger.lives(owner) and self._ledger.lives(user)
        ]

    def events(self) -> int:
        """Return how many interprocess events, and openings of them, living processes have not destroyed."""
        return self._ledger.count(
            "select process from events where shared and not destroyed union all select process from openings"
        )

    def streams(self) -> int:
        """Return how many streams living processes have made and not destroyed, without their default ones."""
        return self._ledger.count("select process from streams")

    def mappings(self) -> int:
        """Return how many allocations are open in living processes other than their owners."""
        return self._ledger.count("select process from mappings")
