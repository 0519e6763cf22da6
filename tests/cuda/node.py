"""A node of the simulated CUDA driver: its table in one directory, as a test observes and controls it.

The structures are those of `simulated/table.h`. Rows are changed under flock, as the driver does.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, get_args

Fault = Literal["copy_fails", "poison", "hold"]

# Errors that a driver may answer with.
NOT_FOUND, NOT_SUPPORTED, DEVICE_UNAVAILABLE = 500, 801, 46

# The variable by which a process finds its node.
NODE_VARIABLE = "KVF_SIMULATED_CUDA"

_FAULTS: dict[str, int] = {name: number for number, name in enumerate(get_args(Fault), start=1)}
_UNUSED, _LIVE, _FREED = range(3)
_MEMORY, _EVENT = range(2)
_u32, _u64 = ctypes.c_uint32, ctypes.c_uint64
_Token = ctypes.c_uint8 * 16


class _Owner(ctypes.Structure):
    _fields_ = [("started", _u64), ("pid", ctypes.c_int32), ("spare", _u32)]


class _Device(ctypes.Structure):
    _fields_ = [("uuid", _Token), ("nbytes", _u64), ("mig", _u32), ("vanished", _u32)]


class _FaultRow(ctypes.Structure):
    _fields_ = [("remaining", _u32), ("hits", _u32)]


class _Refusal(ctypes.Structure):
    _fields_ = [("what", ctypes.c_char * 56), ("result", _u32), ("given", _u32)]


class _Memory(ctypes.Structure):
    _fields_ = [
        ("token", _Token),
        ("owner", _Owner),
        ("nbytes", _u64),
        ("physical", _u64),
        ("device", _u32),
        ("exportable", _u32),
        ("state", _u32),
        ("spare", _u32),
    ]


class _Opening(ctypes.Structure):
    _fields_ = [("owner", _Owner), ("of", _u32), ("row", _u32), ("state", _u32), ("spare", _u32)]


class _Event(ctypes.Structure):
    _fields_ = [
        ("token", _Token),
        ("owner", _Owner),
        ("device", _u32),
        ("state", _u32),
        ("recorded", _u64),
        ("reached", _u64 * 32),
    ]


class _Work(ctypes.Structure):
    _fields_ = [
        ("owner", _Owner),
        ("serial", _u64),
        ("stream", _u64),
        ("writes", _u32),
        ("spans", _u32),
        ("state", _u32),
        ("spare", _u32),
    ]


class _Table(ctypes.Structure):
    _fields_ = [
        ("size", _u64),
        ("seed", _u64),
        ("max_delay_s", ctypes.c_double),
        ("serial", _u64),
        ("physical", _u64),
        ("released", _u64),
        ("batches", _u64),
        ("kernels", _u64),
        ("driver_version", _u32),
        ("device_count", _u32),
        ("processes", _u32),
        ("virtual_memory", _u32),
        ("devices", _Device * 8),
        ("faults", _FaultRow * 8 * 4),
        ("refusals", _Refusal * 16),
        ("memories", _Memory * 8192),
        ("openings", _Opening * 8192),
        ("events", _Event * 1024),
        ("works", _Work * 512),
        ("spans", _u64 * 2 * 128 * 512),
    ]


class Violation(NamedTuple):
    """A misuse that a real device would not detect. `process` is the id of the process."""

    kind: str
    text: str
    process: int


class CudaNode:
    """Devices in `directory` (made if it is not there), of `nbytes` each; `devices` are their UUIDs as
    CUDA_VISIBLE_DEVICES takes them. Delays of queued work are drawn from `seed`, up to `max_delay_s` each.

    `mig`: they are instances of divided GPUs, of which a process sees one. Close it after every process has ended.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        devices: int = 2,
        nbytes: int = 1 << 30,
        seed: int = 0,
        max_delay_s: float = 0.002,
        driver_version: int = 13000,
        mig: bool = False,
    ) -> None:
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        with (path / "table").open("xb") as file:
            file.truncate(ctypes.sizeof(_Table))
        self._open(path)
        table = self._table
        table.seed, table.max_delay_s, table.driver_version = seed, max_delay_s, driver_version
        table.device_count = devices
        table.physical = 1 << 20
        for number in range(devices):
            # The first four bytes distinguish them, since people often write only those.
            row, name = table.devices[number], uuid.UUID(int=(number + 1) << 120 | seed << 64 | 0x5EED)
            row.uuid[:] = name.bytes
            row.nbytes, row.mig = nbytes, mig
        table.size = ctypes.sizeof(_Table)
        self.devices = self._names()

    @classmethod
    def attached(cls, directory: str | Path) -> CudaNode:
        node = cls.__new__(cls)
        node._open(Path(directory))
        node.devices = node._names()
        return node

    def __enter__(self) -> CudaNode:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        if not self._file.closed:
            del self._table
            self._mapped.close()
            self._file.close()

    def inject(self, fault: Fault, device: str, *, count: int = 1) -> None:
        """Make the next `count` batched copies or kernels on the device fail, poison the context of their process, or
        stop halfway until `release`. Works across processes. Raises `ValueError` for an unknown kind."""
        if fault not in _FAULTS:
            raise ValueError(f"there is no fault {fault!r}: {', '.join(_FAULTS)}")
        with self._locked():
            self._table.faults[_FAULTS[fault]][self._number(device)].remaining += count

    def hits(self, fault: Fault) -> int:
        return sum(row.hits for row in self._table.faults[_FAULTS[fault]])

    def release(self) -> None:
        with self._locked():
            for rows in self._table.faults:
                for row in rows:
                    row.remaining = 0
            self._table.released += 1

    @contextmanager
    def refusing(self, *calls: str, result: int = NOT_SUPPORTED) -> Iterator[None]:
        """Make the driver answer each of `calls` with an error meanwhile, in every process: a call, or a call with
        something in it, by the name that `simulated/*.c` give to `refused`. Fails for one that nobody made."""
        rows = self._table.refusals[: len(calls)]
        with self._locked():
            for row, call in zip(rows, calls, strict=True):
                row.what, row.result, row.given = call.encode(), result, 0
        try:
            yield
            assert [row.what.decode() for row in rows if not row.given] == [], "nobody was refused"
        finally:
            with self._locked():
                for row in rows:
                    row.result = 0

    def vanish(self, device: str, *, back: bool = False) -> None:
        self._table.devices[self._number(device)].vanished = not back

    @contextmanager
    def virtual_memory(self) -> Iterator[None]:
        """Make later allocations impossible to export, like those that a virtual-memory allocator maps."""
        self._table.virtual_memory = 1
        try:
            yield
        finally:
            self._table.virtual_memory = 0

    def violations(self) -> list[Violation]:
        try:
            lines = (self.path / "violations").read_text().splitlines()
        except FileNotFoundError:
            return []
        rows = [line.split("\t", 2) for line in lines]
        return [Violation(kind, text, int(process)) for kind, process, text in rows]

    def launched(self) -> tuple[int, int]:
        return self._table.batches, self._table.kernels

    def mappings(self) -> int:
        return self._openings(_MEMORY)

    def events(self) -> int:
        """Return the number of interprocess events of living processes that are not destroyed, and of open imports of
        them."""
        alive = _Alive()
        own = sum(row.state == _LIVE and alive(row.owner) for row in self._table.events)
        return own + self._openings(_EVENT)

    def _openings(self, of: int) -> int:
        alive = _Alive()
        return sum(row.state == _LIVE and row.of == of and alive(row.owner) for row in self._table.openings)

    def _open(self, path: Path) -> None:
        self.path = path
        self._file = (path / "table").open("r+b")
        self._mapped = mmap.mmap(self._file.fileno(), 0)
        self._table = _Table.from_buffer(self._mapped)

    def _names(self) -> Sequence[str]:
        rows = self._table.devices[: self._table.device_count]
        return tuple(f"{'MIG' if row.mig else 'GPU'}-{uuid.UUID(bytes=bytes(row.uuid))}" for row in rows)

    def _number(self, device: str) -> int:
        if device not in self.devices:
            raise ValueError(f"there is no device {device!r}: {', '.join(self.devices)}")
        return self.devices.index(device)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # It needs its own descriptor: a shared one would share the lock.
        with (self.path / "table").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class _Alive:
    """Return the processes that live; each is looked up once."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], bool] = {}

    def __call__(self, owner: _Owner) -> bool:
        key = (owner.pid, owner.started)
        if key not in self._found:
            self._found[key] = owner.started != 0 and _started(owner.pid) == owner.started
        return self._found[key]


def _started(pid: int) -> int:
    """Return the start time of a process; 0 if it has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
