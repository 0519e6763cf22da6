"""Builds for the tests of CUDA: the simulated driver, and the gather kernel for the host.

Each is built once per run, into a directory that is removed with the process. A failed build skips the test and shows
the compiler's message.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.cuda.node import NODE_VARIABLE

KERNELS_VARIABLE = "KVF_SIMULATED_CUDA_KERNELS"
SONAME = "libcuda.so.1"

_HERE = Path(__file__).parent
_GATHER = _HERE.parents[1] / "plugins" / "devices" / "cuda" / "kvf_cuda_ipc" / "gather.cu"
_SHIM = _HERE / "host_kernel.h"


@functools.cache
def driver_library() -> Path:
    """The simulated driver, alone in its directory. Skips if it cannot be built."""
    if not _has_bindings():
        pytest.skip("cuda-bindings is not installed")
    found = compiler("cc")
    library = _directory() / SONAME
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"]
    sources = sorted(map(str, (_HERE / "simulated").glob("*.c")))
    _run([found, *flags, "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{SONAME}", "-o", str(library), *sources, "-ldl"])
    return library


@functools.cache
def kernels_library() -> Path:
    """The plugin's kernels, built for the host. Skips if they cannot be built."""
    for needed in (_GATHER, _SHIM):
        if not needed.exists():
            pytest.skip(f"{needed.name} is not there")
    found = compiler("c++")
    library = _directory() / "libkernels.so"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
    flags += ["-fsanitize=undefined", "-fno-sanitize-recover", "-include", str(_SHIM), "-x", "c++"]
    _run([found, *flags, str(_GATHER), "-o", str(library)])
    return library


def environment(node: Path, *, kernels: bool = False) -> dict[str, str]:
    """Return the variables by which a new process finds the simulated driver, and `node` by it."""
    found = {
        NODE_VARIABLE: str(node),
        "LD_LIBRARY_PATH": os.pathsep.join(
            filter(None, [str(driver_library().parent), os.environ.get("LD_LIBRARY_PATH")])
        ),
    }
    return {**found, KERNELS_VARIABLE: str(kernels_library())} if kernels else found


def preload() -> None:
    """Make `cuda.bindings` of this process load the simulated driver. Skips if it has loaded another one before."""
    library = driver_library()
    others = {path for path in _loaded() if path != str(library)}
    if others:
        pytest.skip(f"this process has loaded the driver of a device: {', '.join(sorted(others))}")
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def is_simulated() -> bool:
    return driver_library.cache_info().currsize > 0 and str(driver_library()) in _loaded()


def _loaded() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {path for path in (line.split(maxsplit=5)[-1] for line in lines) if Path(path).name.startswith("libcuda.so")}


def _has_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings.driver") is not None
    except ModuleNotFoundError:
        return False


def compiler(name: str) -> str:
    """Return the path of a build tool. Skips if it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name} to build it with")
    return found


@functools.cache
def _directory() -> Path:
    directory = tempfile.mkdtemp(prefix="kvf-simulated-cuda-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"{command[0]} failed:\n{done.stderr}")
