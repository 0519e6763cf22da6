"""The check of the machine's NUMA nodes and their accelerators. The nodes of L1 are reported by its plugin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvframework.api.findings import Finding

# Classes of PCI devices: 3D controllers and processing accelerators; of display controllers only NVIDIA's.
_COMPUTES = ("0x0302", "0x1200")
_SHOWS, _NVIDIA = "0x0300", "0x10de"


def nodes(sysfs: Path = Path("/sys")) -> Iterator[Finding]:
    folder = sysfs / "devices" / "system" / "node"
    found = sorted(folder.glob("node[0-9]*"), key=lambda node: int(node.name.removeprefix("node")))
    if len(found) < 2:
        yield Finding("numa.nodes", "ok", "one node" if found else "the kernel reports none")
        return
    listed = "; ".join(f"{node.name} has the CPUs {_cpus(node)}" for node in found)
    yield Finding("numa.nodes", "ok", f"{len(found)}: {listed}")
    yield _accelerators(sysfs / "bus" / "pci" / "devices")


def _cpus(node: Path) -> str:
    try:
        return (node / "cpulist").read_text().strip() or "none"
    except OSError:
        return "unknown"


def _accelerators(folder: Path) -> Finding:
    places: dict[str, list[str]] = {}
    for device in sorted(filter(_computes, folder.glob("*"))):
        node = _text(device / "numa_node")
        places.setdefault(f"node{node}" if node.isdigit() else "no known node", []).append(device.name)
    if not places:
        return Finding("numa.accelerators", "ok", "there are no accelerators on the PCI bus")
    listed = "; ".join(f"{', '.join(devices)} on {place}" for place, devices in sorted(places.items()))
    (first, *others) = places
    if others or not first.startswith("node"):
        return Finding("numa.accelerators", "ok", listed)
    advice = (
        f"run the server and its engines there: numactl --cpunodebind={first.removeprefix('node')} kvframework serve"
    )
    return Finding("numa.accelerators", "ok", listed, advice)


def _computes(device: Path) -> bool:
    kind = _text(device / "class")[:6]
    return kind in _COMPUTES or (kind == _SHOWS and _text(device / "vendor") == _NVIDIA)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
