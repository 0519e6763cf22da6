"""A simulated node as a test sees it from above: its devices' memory and its ledger in one private directory."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from kvf_dev.testing.accelerator.ledger import Ledger

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
