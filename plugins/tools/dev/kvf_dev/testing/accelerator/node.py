"""A simulated node: its devices' memory and its ledger in one private directory, and the errors of its runtime.

The ledger is one SQLite file, so that a process killed at any moment leaves it whole. Every call is short and takes the
file's lock; thread-safe.
"""

from __future__ import annotations

import array
import os
import sqlite3
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, get_args


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


Fault = Literal["copy_fails", "poison", "hold"]

# The variable by which a process finds its node, unless it is given one.
NODE_VARIABLE = "KVF_SIMULATED_NODE"


class Violation(NamedTuple):
    """A mistake that a real device would have hidden. `process` is the process's number on the node."""

    kind: str
    text: str
    process: int


class SimulatedNode:
    """Creates devices in `directory` (created if missing, else empty) and watches over them. Delays of queued work are
    drawn from `seed`, up to `max_delay_s` each. Close it after every process has ended."""

    def __init__(
        self,
        directory: str | Path,
        *,
        devices: int = 2,
        nbytes: int = 32 << 20,
        seed: int = 0,
        max_delay_s: float = 0.002,
    ) -> None:
        self.path = Path(directory)
        self.devices: Sequence[str] = tuple(str(uuid.UUID(int=seed << 64 | number + 1)) for number in range(devices))
        self.path.mkdir(parents=True, exist_ok=True)
        self._ledger = Ledger.create(self.path)
        with self._ledger.change():
            for name, value in (("seed", seed), ("max_delay_s", max_delay_s)):
                self._ledger.run("insert into settings values(?, ?)", name, str(value))
            for number, device in enumerate(self.devices):
                self._ledger.run("insert into devices values(?, ?, ?, 0)", device, number, nbytes)
        for device in self.devices:
            with (self.path / device).open("wb") as memory:
                memory.truncate(nbytes)

    @classmethod
    def attached(cls, directory: str | Path) -> SimulatedNode:
        """Return the node that was made in `directory`, for another observer."""
        node = cls.__new__(cls)
        node.path = Path(directory)
        node._ledger = Ledger(node.path)
        node.devices = tuple(row[0] for row in node._ledger.all("select uuid from devices order by number"))
        return node

    def __enter__(self) -> SimulatedNode:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._ledger.close()

    def inject(self, fault: Fault, device: str, *, count: int = 1) -> None:
        """Make the next `count` copies on the device fail, poison the context of their process, or stop in the middle
        until `release`. Works across processes. Raises `ValueError` for an unknown fault or device."""
        if fault not in get_args(Fault):
            raise ValueError(f"there is no fault {fault!r}: {', '.join(get_args(Fault))}")
        self._check(device)
        self._ledger.insert("insert into faults(kind, device, remaining) values(?, ?, ?)", fault, device, count)

    def hits(self, fault: Fault) -> int:
        """Return how often such a fault has happened."""
        row = self._ledger.one("select coalesce(sum(hits), 0) from faults where kind = ?", fault)
        return int(row[0]) if row else 0

    def release(self) -> None:
        """End all remaining faults, and let held copies continue."""
        self._ledger.run("update faults set remaining = 0")
        self._ledger.run(
            "insert into settings values('released', '1') on conflict(name) do update set value = value + 1"
        )

    def vanish(self, device: str, *, back: bool = False) -> None:
        """Make every call on the device fail from now on, in every process, until it is `back`."""
        self._check(device)
        self._ledger.run("update devices set vanished = ? where uuid = ?", int(not back), device)

    def violations(self) -> list[Violation]:
        """Return all misuse so far, and contexts that dead processes left mapped."""
        found = [Violation(*row) for row in self._ledger.all("select kind, text, process from violations order by id")]
        return found + [
            Violation("leaked_context", f"memory of the dead process {owner} is mapped by process {process}", process)
            for owner, process in self.leaks()
        ]

    def leaks(self) -> list[tuple[int, int]]:
        """Return (dead owner, living process that still maps its memory) for every mapping."""
        rows = self._ledger.all(
            "select allocations.process, mappings.process from mappings join allocations on allocations.id = allocation"
        )
        return [(owner, user) for owner, user in rows if not self._ledger.lives(owner) and self._ledger.lives(user)]

    def events(self) -> int:
        """Return how many interprocess events of living processes are not destroyed, and openings of them not
        closed."""
        rows = self._ledger.all("select process from events where destroyed = 0")
        rows += self._ledger.all("select process from openings")
        return sum(self._ledger.lives(process) for (process,) in rows)

    def streams(self) -> int:
        """Return how many streams living processes have made and not destroyed, without their default ones."""
        return sum(self._ledger.lives(process) for (process,) in self._ledger.all("select process from streams"))

    def mappings(self) -> int:
        """Return how many allocations are open in living processes other than their owners."""
        rows = self._ledger.all("select process from mappings")
        return sum(self._ledger.lives(process) for (process,) in rows)

    def _check(self, device: str) -> None:
        if device not in self.devices:
            raise ValueError(f"there is no device {device!r}: {', '.join(self.devices)}")
