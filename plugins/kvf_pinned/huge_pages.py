"""Whether the arena gets huge pages. Pure reading of sysfs.

They are transparent ones: the kernel takes them for a file in memory if `shmem_enabled` says so. With them a process
maps the arena in a thousandth of the time and of the memory for page tables.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import NamedTuple

from kvf_pinned.options import HugePages
from kvframework.api.options import ByteSize
from kvframework.api.shared_mapping import huge_page_bytes

_FOLDER = Path("kernel/mm/transparent_hugepage")
_ENTRY_BYTES = 8
# The arena asks for them, so "advise" is enough.
_ENOUGH = ("always", "within_size", "advise", "force")

TURN_ON = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"


class Pages(NamedTuple):
    """The choice and its reason, as text."""

    huge: bool
    reason: str

    @property
    def size(self) -> ByteSize:
        return ByteSize(huge_page_bytes() if self.huge else mmap.PAGESIZE)

    def tables(self, nbytes: int) -> ByteSize:
        """The page tables of a process that has mapped so many bytes."""
        return ByteSize(-(-nbytes // self.size) * _ENTRY_BYTES)


SMALL = Pages(False, "huge_pages is off")


def choose_pages(wanted: HugePages, sysfs: Path = Path("/sys")) -> Pages:
    """Evaluates `[l1] huge_pages` on this machine, "on" as "auto". An unreadable file counts as none."""
    if wanted == "off":
        return SMALL
    # A setting for this size, if the kernel has one, counts more than that for all.
    sizes = sorted((sysfs / _FOLDER).glob("hugepages-2048kB/shmem_enabled"))
    for file in (*sizes, sysfs / _FOLDER / "shmem_enabled"):
        if (chosen := _chosen(file)) not in ("", "inherit"):
            return Pages(chosen in _ENOUGH, f"shmem_enabled is {chosen}")
    return Pages(False, "the kernel has none for shared memory")


def _chosen(file: Path) -> str:
    """The word in brackets."""
    try:
        return file.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""
