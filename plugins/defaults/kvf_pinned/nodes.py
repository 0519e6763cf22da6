"""The NUMA nodes of the arena: their choice, by sysfs, and the system call that sets them. The options of the `pinned`
memory, as they stand in the `[l1]` table; and how files of /proc and /sys are read."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

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
