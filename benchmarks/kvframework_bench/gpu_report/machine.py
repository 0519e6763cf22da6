"""What can be seen of a machine's GPUs without CUDA: files of the driver, devices, the PCI bus, variables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

_NVIDIA = "0x10de"
_VARIABLES = re.compile(r"CUDA_\w+|NVIDIA_\w+|PYTORCH_\w*ALLOC_CONF|LD_LIBRARY_PATH")
_PCI_FILES = ("class", "device", "numa_node", "current_link_speed", "current_link_width", "max_link_speed")
_MOST = 64


class DeviceFile(msgspec.Struct, frozen=True):
    """A file of /dev. `opens`: this user may read and write it."""

    name: str
    mode: str
    uid: int
    gid: int
    opens: bool


class GpuMachine(msgspec.Struct, frozen=True):
    """Each text is as the kernel has it; empty where there is none. `gpus` are texts of the driver by PCI address,
    `on_the_bus` the files of NVIDIA's devices likewise."""

    driver: str
    module: str
    gpus: dict[str, str]
    devices: list[DeviceFile]
    on_the_bus: dict[str, dict[str, str]]
    variables: dict[str, str]
    pid_namespace: str
    ipc_namespace: str
    memlock: str

    @property
    def has_gpu(self) -> bool:
        """Whether the kernel has a GPU for this process; CUDA may see none all the same."""
        return bool(self.gpus) or any(re.fullmatch(r"nvidia\d+", each.name) for each in self.devices)


def look(root: Path = Path("/")) -> GpuMachine:
    """Return what `root` has. Raises nothing for a file that is not there."""
    proc = root / "proc"
    return GpuMachine(
        driver=_text(proc / "driver" / "nvidia" / "version"),
        module=_text(root / "sys" / "module" / "nvidia" / "version"),
        gpus={each.parent.name: _text(each) for each in _found(proc / "driver" / "nvidia" / "gpus", "*/information")},
        devices=list(_devices(root / "dev")),
        on_the_bus={
            each.name: {name: _text(each / name) for name in _PCI_FILES}
            for each in _found(root / "sys" / "bus" / "pci" / "devices", "*")
            if _text(each / "vendor") == _NVIDIA
        },
        variables={name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)},
        pid_namespace=_link(proc / "self" / "ns" / "pid"),
        ipc_namespace=_link(proc / "self" / "ns" / "ipc"),
        memlock=next(
            (line for line in _text(proc / "self" / "limits").splitlines() if line.startswith("Max locked memory")), ""
        ),
    )


def _devices(folder: Path) -> Iterable[DeviceFile]:
    for each in _found(folder, "nvidia*"):
        try:
            status = each.stat()
        except OSError:
            continue
        opens = os.access(each, os.R_OK | os.W_OK)
        yield DeviceFile(each.name, f"{status.st_mode:o}", status.st_uid, status.st_gid, opens)


def _found(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))[: 16 * _MOST] if folder.is_dir() else []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
