"""The NUMA nodes of the arena: their choice, by sysfs, and the system call that sets them.

The options of the `pinned` memory, as they stand in the `[l1]` table; and how files of /proc and /sys are read.

Which pages the arena gets, by sysfs and cgroup files. Huge pages are those that an administrator reserved (hugetlb),
or transparent ones, which the kernel takes for a file in memory if `shmem_enabled` says so. With either a process maps
the arena in a thousandth of the time and of the memory for page tables.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from kvframework.api.memory import cgroup_folders, huge_page_bytes
from kvframework.api.plugin import ByteSize, Options

# The number of mbind in the system call table, for 64-bit processes.
_NUMBERS = {"x86_64": 237, "aarch64": 235, "riscv64": 235, "ppc64le": 259, "s390x": 268}

# Neither makes an allocation fail where another node has room. <linux/mempolicy.h>
_PREFERRED, _INTERLEAVE = 1, 3

_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

_OFF = 'set [l1] numa = "off"'
_HINTS = {
    errno.EPERM: f"give the container the capability SYS_NICE, or {_OFF}",
    errno.EINVAL: f"name nodes of Mems_allowed_list in /proc/self/status, or {_OFF}",
}

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long


def place(segment: mmap.mmap | memoryview, nodes: Sequence[int]) -> None:
    """Set the nodes of the pages of `segment` that are not resident yet: one preferred node, or several interleaved,
    while they have room. Of a memfd that holds for every process, whichever touches a page first. Does not block.
    Raises `OSError`, which `hint` explains: EPERM where a container does not allow it, EINVAL for a node that does not
    exist or is not allowed, ENOSYS for a kernel without NUMA."""
    number = _NUMBERS.get(platform.machine())
    if number is None or sys.maxsize < 1 << 32:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    mask = (ctypes.c_ulong * (max(nodes) // _WORD_BITS + 1))()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    anchor = ctypes.c_char.from_buffer(segment)
    # The kernel uses one bit less than the given number.
    bits = _WORD_BITS * len(mask) + 1
    mode = _PREFERRED if len(nodes) == 1 else _INTERLEAVE
    status = _syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(ctypes.addressof(anchor)),
        ctypes.c_size_t(len(segment)),
        ctypes.c_ulong(mode),
        mask,
        ctypes.c_ulong(bits),
        ctypes.c_ulong(0),
    )
    if status != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def hint(error: OSError) -> str:
    return _HINTS.get(error.errno or 0, _OFF)


_3D_CONTROLLER, _PROCESSING_ACCELERATOR, _VGA_CONTROLLER = 0x0302, 0x1200, 0x0300
_NVIDIA = 0x10DE


class Choice(NamedTuple):
    """The chosen nodes and the reason. One node is preferred, several are interleaved, none leaves the choice to the
    kernel."""

    nodes: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        """The arena's placement and the reason, as text."""
        if not self.nodes:
            return f"lies on nodes that the kernel chooses: {self.reason}"
        how = "lies on" if len(self.nodes) == 1 else "is interleaved over"
        return f"{how} {self.names}, while there is room: {self.reason}"

    @property
    def names(self) -> str:
        return _names(self.nodes)


ANYWHERE = Choice((), "numa is off")


def choose(numa: Numa, sysfs: Path = Path("/sys")) -> Choice:
    """Evaluates `[l1] numa` on this machine. An unreadable file counts as empty, and never stops a start."""
    if numa == "off":
        return ANYWHERE
    if not isinstance(numa, str):
        return Choice(tuple(sorted(set(numa))), "the configuration names them")
    usable = memory_nodes(sysfs)
    if len(usable) < 2:
        return Choice((), "there is one NUMA node" if usable else "the kernel reports no NUMA nodes")
    near = accelerators(sysfs).keys() - {-1}
    if not near:
        return Choice((), "no accelerator reports its NUMA node")
    chosen = tuple(node for node in usable if node in near)
    if not chosen:
        return Choice((), f"the accelerators are on {_names(sorted(near))}, where there is no memory")
    return Choice(chosen, "these nodes have accelerators")


def memory_nodes(sysfs: Path = Path("/sys")) -> list[int]:
    nodes: list[int] = []
    for part in text_in(sysfs / "devices/system/node/has_memory").split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            nodes += range(int(first), int(last or first) + 1)
    return nodes


def accelerators(sysfs: Path = Path("/sys")) -> dict[int, list[str]]:
    """The compute accelerators on the PCI bus by NUMA node, -1 where the kernel does not know it."""
    found: dict[int, list[str]] = {}
    for device in sorted(filter(_computes, (sysfs / "bus/pci/devices").glob("*"))):
        node = number_in(device / "numa_node")
        found.setdefault(-1 if node is None else node, []).append(device.name)
    return found


def _computes(device: Path) -> bool:
    code = (number_in(device / "class") or 0) >> 8
    if code == _VGA_CONTROLLER:
        # Other vendors' devices of this class are mostly the chip that draws the console.
        return number_in(device / "vendor") == _NVIDIA
    return code in (_3D_CONTROLLER, _PROCESSING_ACCELERATOR)


def _names(nodes: Sequence[int]) -> str:
    return f"NUMA node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"


LEAST = ByteSize(1 << 20)

# The kernel's node masks have this many bits.
Numa = Literal["auto", "off"] | list[Annotated[int, Meta(ge=0, le=1023)]]

HugePages = Literal["auto", "on", "off", "transparent"]


class PinnedOptions(Options, frozen=True):
    """Options of the `pinned` memory; each field has a description."""

    capacity: Annotated[ByteSize, Meta(description="size of the arena, at least 1 MiB")] = ByteSize(1 << 30)
    numa: Annotated[
        Numa,
        Meta(
            description='NUMA nodes of the arena: "auto", the nodes of the accelerators; "off", chosen by the kernel; '
            "or a list of node numbers"
        ),
    ] = "auto"
    huge_pages: Annotated[
        HugePages,
        Meta(
            description='huge pages: "auto", reserved pages if enough are free, else transparent pages '
            'if the kernel allows them for shared memory; "transparent", never reserved pages; '
            '"on", refuse to start without huge pages; "off", normal pages'
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        if self.capacity < LEAST:
            raise ValueError(f"capacity is {self.capacity!s}, expected at least {LEAST}")
        if not self.numa:
            raise ValueError('numa is "auto", "off" or a list of at least one node, found []')


def text_in(file: Path) -> str:
    """What the file says, "" if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def number_in(file: Path) -> int | None:
    try:
        return int(text_in(file), 0)
    except ValueError:
        return None


_TRANSPARENT = Path("kernel/mm/transparent_hugepage")
_RESERVED = Path("kernel/mm/hugepages")
_ENTRY_BYTES = 8
_LOOK_S = 0.01
# Smaller arenas have nothing to gain, and would lose up to a page to be whole.
_LEAST_PAGES = 32
# The arena asks for them, so "advise" is enough.
_ENOUGH = ("always", "within_size", "advise", "force")

TURN_ON = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"


class Pages(NamedTuple):
    """The kind of pages, and the reason, as text."""

    kind: Literal["small", "transparent", "reserved"]
    reason: str

    @property
    def size(self) -> ByteSize:
        return ByteSize(mmap.PAGESIZE if self.kind == "small" else huge_page_bytes())

    def whole(self, nbytes: int) -> int:
        """The bytes that an arena of at least so many has: reserved pages are not divided."""
        return _pages(nbytes) * self.size if self.kind == "reserved" else nbytes

    def tables(self, nbytes: int) -> ByteSize:
        """The page tables of a process that has mapped so many bytes."""
        return ByteSize(-(-nbytes // self.size) * _ENTRY_BYTES)

    def __str__(self) -> str:
        kind = "" if self.kind == "small" else f"{self.kind} "
        return f"the arena has {kind}pages of {self.size}"


SMALL = Pages("small", "huge_pages is off")


class Pool(NamedTuple):
    """The reserved pages of the size of a transparent one: their number, and how many no process has or was promised;
    of these numbers what the cgroup leaves this process."""

    machine: int
    unused: int
    most: int
    free: int

    def __str__(self) -> str:
        limited = f", as the cgroup allows, of {self.machine}" if self.most < self.machine else ""
        return f"{self.free} of {self.most} reserved pages are free{limited}"

    def could_hold(self, nbytes: int) -> bool:
        """Whether they are enough once no other process has any, as an earlier server has that ends."""
        return self.most >= _pages(nbytes)

    def holds(self, nbytes: int) -> bool:
        return self.free >= _pages(nbytes)

    def more(self, nbytes: int) -> str:
        """The command that reserves enough, beside what others have."""
        return f"sysctl vm.nr_hugepages={self.machine - self.unused + _pages(nbytes)}"


def read_pool(sysfs: Path = Path("/sys"), proc: Path = Path("/proc")) -> Pool:
    """The pool of this machine. What cannot be read counts as no pages, and as no limit."""
    folder = sysfs / _RESERVED / f"hugepages-{huge_page_bytes() >> 10}kB"
    machine, free, promised = (number_in(folder / f"{name}_hugepages") or 0 for name in ("nr", "free", "resv"))
    unused = max(free - promised, 0)
    limits = list(_limits(proc, sysfs / "fs" / "cgroup"))
    return Pool(
        machine,
        unused,
        min([machine, *(limit // huge_page_bytes() for limit, _ in limits)]),
        min([unused, *(max(limit - used, 0) // huge_page_bytes() for limit, used in limits)]),
    )


def wait_for_pool(nbytes: int, seconds: float) -> bool:
    """Whether enough reserved pages are free; blocks until they are, for so long at most: those of a server that has
    ended are, once its last engine has unmapped them."""
    until = time.monotonic() + seconds
    while not read_pool().holds(nbytes):
        if time.monotonic() >= until:
            return False
        time.sleep(_LOOK_S)
    return True


def choose_pages(wanted: HugePages, nbytes: int, sysfs: Path = Path("/sys"), proc: Path = Path("/proc")) -> Pages:
    """Evaluates `[l1] huge_pages` for an arena of `nbytes` on this machine, "on" as "auto", but also for a
    small one. Reserved pages count while others have them, too."""
    if wanted == "off":
        return SMALL
    why_not = ""
    if wanted == "on" or (wanted == "auto" and _pages(nbytes) >= _LEAST_PAGES):
        pool = read_pool(sysfs, proc)
        if pool.could_hold(nbytes):
            return Pages("reserved", str(pool))
        if pool.machine:
            why_not = f"; {pool}, {_pages(nbytes)} are needed"
    # A setting for this size, if the kernel has one, counts more than that for all.
    sizes = sorted((sysfs / _TRANSPARENT).glob("hugepages-2048kB/shmem_enabled"))
    for file in (*sizes, sysfs / _TRANSPARENT / "shmem_enabled"):
        if (chosen := _chosen(file)) not in ("", "inherit"):
            return Pages("transparent" if chosen in _ENOUGH else "small", f"shmem_enabled is {chosen}{why_not}")
    return Pages("small", f"the kernel has no huge pages for shared memory{why_not}")


def pages_of_kept(fd: int, wanted: HugePages, nbytes: int) -> Pages:
    """The pages of a kept arena: it stays in the pool, or out of it, as the server that made it had it. Raises
    `OSError`."""
    if os.fstatvfs(fd).f_bsize > mmap.PAGESIZE:
        return Pages("reserved", "the server that made this memory chose the page size")
    return choose_pages("off" if wanted == "off" else "transparent", nbytes)


def _pages(nbytes: int) -> int:
    return -(-nbytes // huge_page_bytes())


def _limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of the groups above this process, in bytes. Kubernetes sets limits of 0 for containers that ask for
    no such pages."""
    for folder, version in cgroup_folders("hugetlb", proc, cgroups):
        limit, use = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
        for kind in (f"hugetlb.{huge_page_bytes() >> 20}MB", f"hugetlb.{huge_page_bytes() >> 20}MB.rsvd"):
            if (most := number_in(folder / f"{kind}.{limit}")) is not None:
                yield most, number_in(folder / f"{kind}.{use}") or 0


def _chosen(file: Path) -> str:
    return text_in(file).partition("[")[2].partition("]")[0]
