"""The check of torch and CUDA. Packages are read as files and never imported: an import takes seconds, and memory of a
device."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from kvframework.api.findings import Finding
from kvframework.api.installing import install_command

_DRIVER = Path("/proc/driver/nvidia/version")
_DEVICES = Path("/dev")

# The first driver for CUDA 13, and so for cuda-bindings 13 and code compiled by its NVRTC.
_DRIVER_OF_CUDA_13 = 580


def cuda(driver_file: Path = _DRIVER, devices: Path = _DEVICES) -> Iterator[Finding]:
    driver = _driver(driver_file)
    yield _torch(bool(driver))
    if not driver:
        yield Finding("cuda.driver", "ok", "no NVIDIA driver: CUDA cannot be used on this machine")
        return
    yield Finding("cuda.driver", "ok", f"NVIDIA driver {driver}")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        yield Finding(
            "cuda.library",
            "warn",
            "there is a driver, but libcuda.so.1 cannot be loaded",
            "start the container with the NVIDIA runtime, or install the driver's libraries",
        )
    else:
        yield Finding("cuda.library", "ok", "libcuda.so.1 can be loaded")
    found = sorted(each for each in devices.glob("nvidia[0-9]*"))
    closed = [each.name for each in found if not os.access(each, os.R_OK | os.W_OK)]
    if closed or not found:
        fact = f"this user may not open {', '.join(closed)}" if closed else "there is a driver, but no device"
        advice = "give the process the devices: --gpus all, or the group of /dev/nvidia*"
        yield Finding("cuda.devices", "warn", fact, advice)
    else:
        yield Finding("cuda.devices", "ok", f"{len(found)}: {', '.join(each.name for each in found)}")
    yield from _packages(_major(driver) or _DRIVER_OF_CUDA_13)


def _driver(file: Path) -> str:
    try:
        match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", file.read_text())
    except OSError:
        return ""
    return match[1] if match else "of an unknown version"


def _packages(driver: int) -> Iterator[Finding]:
    """The packages of cuda_ipc's extras; `driver` is the driver's major version."""
    old = driver < _DRIVER_OF_CUDA_13
    advice = (
        f"for the transport cuda_ipc: {install_command('cuda12' if old else 'cuda13', distribution='kvframework-cuda')}"
    )
    bindings = _version("cuda-bindings")
    if not bindings:
        fact = "cuda-bindings is not installed: only cpu_gather can reach the memory of GPUs"
        yield Finding("cuda.bindings", "warn", fact, advice)
    elif old and _major(bindings) >= 13:
        fact = f"cuda-bindings {bindings} needs a driver from {_DRIVER_OF_CUDA_13} on"
        yield Finding("cuda.bindings", "warn", fact, advice)
    else:
        yield Finding("cuda.bindings", "ok", f"cuda-bindings {bindings}")
    name = "nvidia-cuda-nvrtc-cu12" if _major(bindings) == 12 or (old and not bindings) else "nvidia-cuda-nvrtc"
    nvrtc = _version(name)
    if nvrtc:
        yield Finding("cuda.nvrtc", "ok", f"{name} {nvrtc}")
    else:
        yield Finding("cuda.nvrtc", "warn", f"{name} is not installed: no kernel copies small fragments", advice)


def _version(name: str) -> str:
    """The version of a distribution; empty if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _major(version: str) -> int:
    """The major version; 0 for a text that is no version."""
    first = version.partition(".")[0]
    return int(first) if first.isdigit() else 0


def _torch(driver: bool) -> Finding:
    try:
        found = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return Finding(
            "torch.version",
            "ok",
            "torch is not installed; the server needs none",
            f"cpu_gather needs it in engines: {install_command('torch')}",
        )
    try:
        text = Path(str(found.locate_file("torch/version.py"))).read_text()
    except OSError:
        text = ""
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    if driver and match is None:
        return Finding(
            "torch.version",
            "warn",
            f"torch {found.version} is built without CUDA, and there is an NVIDIA driver",
            "install a torch that is built for CUDA where engines run",
        )
    built = f"for CUDA {match[1]}" if match else "without CUDA"
    return Finding("torch.version", "ok", f"torch {found.version}, {built}")
