"""Owns the check of the machine's NUMA nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvframework.api import Finding


def nodes(folder: Path = Path("/sys/devices/system/node")) -> Iterator[Finding]:
    found = sorted(folder.glob("node[0-9]*"), key=lambda node: int(node.name.removeprefix("node")))
    if len(found) < 2:
        yield Finding("numa.nodes", "ok", "one node" if found else "the kernel tells of none")
        return
    told = "; ".join(f"{node.name} has the CPUs {_cpus(node)}" for node in found)
    yield Finding(
        "numa.nodes", "ok", f"{len(found)}: {told}",
        "run the server where the engines' devices are: numactl --cpunodebind=N --membind=N kvframework serve",
    )  # fmt: skip


def _cpus(node: Path) -> str:
    try:
        return (node / "cpulist").read_text().strip() or "none"
    except OSError:
        return "unknown"
