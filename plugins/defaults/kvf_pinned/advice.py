"""The checks of `kvframework doctor` for an arena that is not created yet: free memory and NUMA nodes."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from kvf_pinned.nodes import (
    TURN_ON,
    Numa,
    Pages,
    PinnedOptions,
    Pool,
    accelerators,
    choose,
    choose_pages,
    hint,
    place,
    read_pool,
    text_in,
)
from kvframework.api.memory import available_memory
from kvframework.api.plugin import ByteSize, Finding

_MOST = 0.9


def diagnose(options: PinnedOptions, sysfs: Path = Path("/sys"), proc: Path = Path("/proc")) -> list[Finding]:
    """Read /proc, /sys and the cgroup files; allocate nothing but one page, to test the placement."""
    pages = choose_pages(options.huge_pages, options.capacity, sysfs, proc)
    return [
        _capacity(options.capacity, pages),
        _huge_pages(options, pages, read_pool(sysfs, proc)),
        _numa(options.numa, sysfs),
        *numa_findings(sysfs),
    ]


def _capacity(capacity: ByteSize, pages: Pages) -> Finding:
    """The finding for an arena that fits; `check_room` refuses any other."""
    if pages.kind == "reserved":
        return Finding("pinned.capacity", "ok", f"the arena of {ByteSize(pages.whole(capacity))} uses reserved pages")
    room = ByteSize(available_memory())
    fact = f"the arena of {capacity} fits into {room} of available memory"
    if capacity > _MOST * room:
        advice = "lower [l1] capacity, which should leave 10 % of memory to the server and its engines"
        return Finding("pinned.capacity", "warn", fact, advice)
    return Finding("pinned.capacity", "ok", fact)


def _huge_pages(options: PinnedOptions, pages: Pages, pool: Pool) -> Finding:
    """The finding for pages that the machine has; `check_pages` refuses others."""
    tables = f"{pages.tables(options.capacity)} of page tables for each process that maps all of it"
    fact = f"{pages}, {tables}: {pages.reason}"
    if pages.kind == "small" and options.huge_pages != "off":
        return Finding("pinned.huge_pages", "ok", fact, f"{TURN_ON}, or {pool.more(options.capacity)}")
    if pages.kind == "reserved" and not pool.holds(options.capacity):
        advice = (
            f"{pool.more(options.capacity)}, or stop other users of these pages; otherwise the arena has other pages"
        )
        return Finding("pinned.huge_pages", "warn", fact, advice)
    return Finding("pinned.huge_pages", "ok", fact)


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


def numa_findings(sysfs: Path = Path("/sys")) -> Iterator[Finding]:
    """The NUMA nodes of this machine, and where its accelerators are."""
    found = (sysfs / "devices" / "system" / "node").glob("node[0-9]*")
    cpus = {int(node.name.removeprefix("node")): text_in(node / "cpulist") or "none" for node in found}
    if len(cpus) < 2:
        yield Finding("numa.nodes", "ok", "one node" if cpus else "the kernel reports none")
        return
    listed = "; ".join(f"node{node} has the CPUs {of}" for node, of in sorted(cpus.items()))
    yield Finding("numa.nodes", "ok", f"{len(cpus)}: {listed}")
    places = sorted(accelerators(sysfs).items())
    at = (f"{', '.join(devices)} on {f'node{node}' if node >= 0 else 'no known node'}" for node, devices in places)
    near = f"numactl --cpunodebind={places[0][0]} kvframework serve" if len(places) == 1 and places[0][0] >= 0 else ""
    advice = f"run the server and its engines on the accelerators' nodes: {near}" if near else ""
    yield Finding("numa.accelerators", "ok", "; ".join(at) or "the PCI bus has no accelerators", advice)
