"""Which pages the arena gets, by sysfs and cgroup files. Huge pages are those that an administrator reserved (hugetlb),
or transparent ones, which the kernel takes for a file in memory if `shmem_enabled` says so. With either a process maps
the arena in a thousandth of the time and of the memory for page tables."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from kvf_pinned.nodes import HugePages, number_in, text_in
from kvframework.api.memory import cgroup_folders, huge_page_bytes
from kvframework.api.plugin import ByteSize

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
