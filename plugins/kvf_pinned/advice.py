"""The checks of `kvframework doctor` for an arena that is not created yet: free memory and NUMA nodes."""

from __future__ import annotations

import mmap
from pathlib import Path

from kvf_pinned.huge_pages import TURN_ON, choose_pages
from kvf_pinned.nodes import choose
from kvf_pinned.options import Numa, PinnedOptions
from kvf_pinned.placement import hint, place
from kvframework.api.available_memory import available_memory
from kvframework.api.findings import Finding
from kvframework.api.options import ByteSize

_MOST = 0.9


def diagnose(options: PinnedOptions, sysfs: Path = Path("/sys")) -> list[Finding]:
    """Reads /proc, /sys and the cgroup files; allocates nothing but one page, to test the placement."""
    return [_capacity(options.capacity), _huge_pages(options, sysfs), _numa(options.numa, sysfs)]


def _capacity(capacity: ByteSize) -> Finding:
    """The finding for an arena that fits; `check_room` refuses any other."""
    room = ByteSize(available_memory())
    fact = f"an arena of {capacity}, where {room} is available"
    if capacity > _MOST * room:
        advice = "leave 10 % for the server and its engines: lower [l1] capacity"
        return Finding("pinned.capacity", "warn", fact, advice)
    return Finding("pinned.capacity", "ok", fact)


def _huge_pages(options: PinnedOptions, sysfs: Path) -> Finding:
    """The finding for pages that the machine has; `check_pages` refuses others."""
    pages = choose_pages(options.huge_pages, sysfs)
    tables = f"{pages.tables(options.capacity)} of page tables for each process that maps all of it"
    advice = "" if pages.huge or options.huge_pages == "off" else TURN_ON
    return Finding("pinned.huge_pages", "ok", f"the arena has pages of {pages.size}, {tables}: {pages.reason}", advice)


def _numa(numa: Numa, sysfs: Path) -> Finding:
    choice = choose(numa, sysfs)
    if choice.nodes:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            try:
                place(page, choice.nodes)
            except OSError as error:
                fact = f"the arena cannot be placed on {choice.names}: {error.strerror}"
                return Finding("pinned.numa", "warn", fact, hint(error))
    return Finding("pinned.numa", "ok", f"the arena {choice}")
