"""The choice of NUMA nodes for the arena. Pure reading of sysfs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvf_pinned.options import Numa

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
            return f"lies where the kernel puts it: {self.reason}"
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
        return Choice(tuple(sorted(set(numa))), "as configured")
    usable = memory_nodes(sysfs)
    if len(usable) < 2:
        return Choice((), "there is one NUMA node" if usable else "the kernel reports no NUMA nodes")
    near = accelerator_nodes(sysfs)
    if not near:
        return Choice((), "no accelerator is known to be on a NUMA node")
    chosen = tuple(node for node in usable if node in near)
    if not chosen:
        return Choice((), f"the accelerators are on {_names(sorted(near))}, where there is no memory")
    return Choice(chosen, "the accelerators are there")


def memory_nodes(sysfs: Path = Path("/sys")) -> list[int]:
    """The nodes that have memory, in order."""
    nodes: list[int] = []
    for part in _text(sysfs / "devices/system/node/has_memory").split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            nodes += range(int(first), int(last or first) + 1)
    return nodes


def accelerator_nodes(sysfs: Path = Path("/sys")) -> set[int]:
    """The nodes that compute accelerators are attached to by PCI, as far as the kernel knows (it says -1 if not)."""
    nodes = (_number(device / "numa_node") for device in _accelerators(sysfs))
    return {node for node in nodes if node is not None and node >= 0}


def _accelerators(sysfs: Path) -> list[Path]:
    return [device for device in (sysfs / "bus/pci/devices").glob("*") if _computes(device)]


def _computes(device: Path) -> bool:
    code = (_number(device / "class") or 0) >> 8
    if code == _VGA_CONTROLLER:
        # Other vendors' devices of this class are mostly the chip that draws the console.
        return _number(device / "vendor") == _NVIDIA
    return code in (_3D_CONTROLLER, _PROCESSING_ACCELERATOR)


def _names(nodes: Sequence[int]) -> str:
    return f"NUMA node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"


def _number(path: Path) -> int | None:
    try:
        return int(_text(path), 0)
    except ValueError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
