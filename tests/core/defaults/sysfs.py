"""A made-up sysfs: NUMA nodes, and devices on the PCI bus."""

from __future__ import annotations

from pathlib import Path

# class and vendor, as the kernel writes them
GPU = ("0x030200", "0x10de")
CONSUMER_GPU = ("0x030000", "0x10de")
OTHER_ACCELERATOR = ("0x120000", "0x1002")
CONSOLE = ("0x030000", "0x1a03")
NETWORK = ("0x020000", "0x15b3")


def sysfs(folder: Path, memory: str, *devices: tuple[tuple[str, str], int], cpus: dict[int, str] | None = None) -> Path:
    """`memory` are the nodes that have some, as in "0-1"; `devices` are kinds and nodes; `cpus` those of all nodes."""
    nodes = folder / "devices" / "system" / "node"
    nodes.mkdir(parents=True)
    (nodes / "has_memory").write_text(f"{memory}\n")
    for node, listed in (cpus or {}).items():
        (nodes / f"node{node}").mkdir()
        (nodes / f"node{node}" / "cpulist").write_text(f"{listed}\n")
    for number, ((kind, vendor), node) in enumerate(devices):
        device = folder / "bus" / "pci" / "devices" / f"0000:{number:02x}:00.0"
        device.mkdir(parents=True)
        for name, text in (("class", kind), ("vendor", vendor), ("numa_node", node)):
            (device / name).write_text(f"{text}\n")
    return folder
