"""Owns the description of the machine and the versions that a figure was taken with."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import msgspec

_PACKAGES = ("kvframework", "pyzmq", "msgspec", "numpy", "torch")


class Machine(msgspec.Struct, frozen=True):
    """`cores` are those that this process may use."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    python: str
    packages: dict[str, str]


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def available_bytes() -> int:
    """The memory that new processes can have without pushing others out, as the kernel estimates it."""
    return int(_field(Path("/proc/meminfo").read_text(), "MemAvailable").split()[0]) * 1024


def describe_machine() -> Machine:
    """Reads /proc; imports nothing of what it names."""
    return Machine(
        cpu=_field(Path("/proc/cpuinfo").read_text(), "model name") or platform.machine(),
        cores=cores(),
        memory_bytes=int(_field(Path("/proc/meminfo").read_text(), "MemTotal").split()[0]) * 1024,
        kernel=platform.release(),
        python=platform.python_version(),
        packages={name: version for name in _PACKAGES if (version := _version(name))},
    )


def _field(text: str, name: str) -> str:
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
