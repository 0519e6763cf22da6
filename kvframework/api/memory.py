"""The `Memory` contract: the shared arena of all objects of L1. And the memory that a process may take."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvframework.api.copying import address_of
from kvframework.api.plugin import Diagnose, O, Provider, TableContext, hookimpl
from kvframework.errors import ArenaError

__all__ = [
    "ArenaError",
    "Memory",
    "MemoryContext",
    "MemoryProvider",
    "SharedMapping",
    "TableContext",
    "available_memory",
    "cgroup_folders",
    "hookimpl",
    "huge_page_bytes",
    "map_shared",
]


class Memory(ABC):
    """One shared segment, created once by the server. Objects are (offset, length) in it; the core allocates, the
    plugin provides the memory. `fd` stays this object's; local clients get and map it. `capacity` is in bytes."""

    fd: int
    capacity: int

    @abstractmethod
    def start(self, on_ready: Callable[[int], None]) -> None:
        """Start making the memory usable, in the background. Does not block. Calls `on_ready(n)`, from a thread of its
        own, with a growing n whenever bytes `[0, n)` are resident; the core allocates only those."""

    @abstractmethod
    def view(self) -> memoryview:
        """Return a writable view of all bytes, valid until `close`."""

    @abstractmethod
    def close(self) -> None:
        """End the background work and free the memory. Views must have been released. Idempotent."""

    def leave(self) -> None:
        """Called instead of `close` if the process ends right afterwards, while views may still exist: release only
        what would outlive the process. By default `close`."""
        self.close()


@dataclass(frozen=True)
class MemoryContext(TableContext):
    """The table, and the memory of an earlier server to go on with. `kept` is a descriptor of the segment that `create`
    made there, with the same options, whose bytes have to stay as they are: the plugin owns it, also when it raises.
    None: a new segment. Only a provider with `keeps` gets one. `outlives`: a next server goes on with this one, and
    waits until the kernel has unmapped it at the end of this process."""

    kept: int | None = None
    outlives: bool = False


@dataclass(frozen=True, kw_only=True)
class MemoryProvider(Provider[O]):
    """The memory that `[l1] use` names. `create` raises `ArenaError` if the memory is not available. `keeps`: it takes
    `MemoryContext.kept`, so that objects outlive the server; `fd` is that of a memfd then, whose memory lasts as long
    as any process has a descriptor of it. `diagnose` as for `TierProvider`, only while no server has the memory."""

    kind = "memory"
    create: Callable[[O, MemoryContext], Memory]
    keeps: bool = False
    diagnose: Diagnose[O] | None = None


_USUAL_BYTES = 2 << 20
_MAP_FIXED = 0x10

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


class SharedMapping(NamedTuple):
    """The mapping of a whole shared file, from byte `begin` of `memory` on, at an address where huge pages can be
    mapped: a multiple of their size, to which the kernel itself aligns a file in memory only where huge pages are on
    for all of them. The mapping ends with `memory`, whose `close` raises `BufferError` while there are views."""

    memory: mmap.mmap
    begin: int
    nbytes: int

    def view(self) -> memoryview:
        """Return a new writable view of the file's bytes."""
        with memoryview(self.memory) as whole:
            return whole[self.begin : self.begin + self.nbytes]

    def advise(self, advice: int) -> None:
        """Call madvise(2) on the file's bytes. Raises `OSError`."""
        self.memory.madvise(advice, self.begin, self.nbytes)


@functools.cache
def huge_page_bytes(sysfs: Path = Path("/sys")) -> int:
    """Return the bytes of this kernel's transparent huge page; 2 MiB if the kernel does not report them."""
    with contextlib.suppress(OSError, ValueError):
        return int((sysfs / "kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    return _USUAL_BYTES


def map_shared(fd: int, nbytes: int) -> SharedMapping:
    """Map the first `nbytes` of a file, shared and writable; `fd` stays the caller's, and may be closed. Raises
    `OSError`, `ValueError` and `OverflowError` as `mmap.mmap`."""
    huge = huge_page_bytes()
    # A file of reserved huge pages the kernel aligns by itself.
    if nbytes >= huge > os.fstatvfs(fd).f_bsize:
        # Address space only, of which the aligned part becomes the file's.
        with contextlib.suppress(OSError, ValueError, OverflowError):
            room = mmap.mmap(-1, nbytes + huge, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with address_of(memoryview(room), True) as (address, _):
                begin = -address % huge
                flags = mmap.MAP_SHARED | _MAP_FIXED
                at = _mmap(address + begin, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
            if at == address + begin:
                return SharedMapping(room, begin, nbytes)
    return SharedMapping(mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE), 0, nbytes)


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that can become resident: MemAvailable or the tightest cgroup's headroom, as far as readable."""
    rooms = [kib * 1024 for name, kib in kernel_table(proc / "meminfo").items() if name == "MemAvailable:"]
    for directory, limit, used, reclaimable in cgroup_limits(proc, cgroups):
        rooms.append(max(limit - used + kernel_table(directory / "memory.stat").get(reclaimable, 0), 0))
    return min(rooms, default=sys.maxsize)


def cgroup_limits(proc: Path, cgroups: Path) -> Iterator[tuple[Path, int, int, str]]:
    """Yield folder, limit and use of each cgroup above this process that has a limit of memory, and the name in its
    memory.stat of what the kernel would reclaim."""
    for folder, version in cgroup_folders("memory", proc, cgroups):
        first = version == 1
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if first else ("memory.max", "memory.current")
        limit, used = (_text(folder / name).strip() for name in names)
        if limit.isdigit() and used.isdigit():
            yield folder, int(limit), int(used), "total_inactive_file" if first else "inactive_file"


def cgroup_folders(controller: str, proc: Path, cgroups: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folder of this process's group and all above it, any of which may hold a limit, and their version of
    cgroups, by which the names of files differ. Where a path is one of the host, the container's root counts."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroups / controller if controllers else cgroups
        folder = root / group.strip("/")
        for each in (folder, *folder.parents):
            yield each, 1 if controllers else 2
            if each == root:
                break


def kernel_table(path: Path) -> dict[str, int]:
    """Return the rows of a file of the kernel that have a number behind their name; none of one that is unreadable."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
