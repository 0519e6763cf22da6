"""The server-driven transport `cuda_ipc`: the server moves KV between the memory of NVIDIA GPUs and the arena.

Importing this module touches neither CUDA nor its bindings: a process that forks later must not have initialised them.
"""

from __future__ import annotations

import ctypes
import importlib.util
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from kvf_devices import Arena, CopierDriver, DeviceOptions, DeviceTransportProvider, EngineDriver
from kvframework.api.installing import install_command
from kvframework.api.plugin import ByteSize, Finding, TableContext, hookimpl

if TYPE_CHECKING:
    from kvf_cuda_ipc.copier_side import Stream
    from kvf_cuda_ipc.driver import Event
    from kvf_cuda_ipc.engine_side import PooledEvent

# The bindings and the compiler, for the texts that miss them.
INSTALL = f"{install_command('cuda13', distribution='kvframework-cuda')}, or [cuda12] for a driver of CUDA 12"


class CudaOptions(DeviceOptions, frozen=True):
    """The options beside those of every device transport; the server's choose how it copies, an engine needs none."""

    engine: Annotated[
        Literal["auto", "dma", "kernel"],
        Meta(description="hardware that copies: the GPU's copy engines, a kernel, or the faster of both"),
    ] = "auto"
    kernel_below: Annotated[ByteSize, Meta(description="with `auto`: the kernel copies fragments with fewer bytes")] = (
        ByteSize(28 << 10)
    )
    kernel_blocks: Annotated[
        int, Meta(ge=1, le=1024, description="most blocks of 512 threads that the kernel may use on the GPU")
    ] = 32


def create_engine(_options: CudaOptions) -> EngineDriver[PooledEvent]:
    """Make the half in engine processes, for all GPUs that they see. Raises `DeviceError` where there is none."""
    from kvf_cuda_ipc.driver import Driver
    from kvf_cuda_ipc.engine_side import CudaEngine

    return CudaEngine(Driver())


def create_copier(options: CudaOptions, device: str, arena: Arena) -> CopierDriver[Event, Stream]:
    """Make the half in the copier process of `device`, a UUID as engines send it. Raises `DeviceError` if the GPU is
    not here."""
    from kvf_cuda_ipc.copier_side import CudaCopier
    from kvf_cuda_ipc.driver import Driver, show_only

    show_only(device)
    return CudaCopier(Driver(), options, device, arena)


def _diagnose(options: CudaOptions, _context: TableContext, _deadline: float) -> list[Finding]:
    from kvf_cuda_ipc.advice import diagnose

    return list(diagnose(options))


def _probe() -> str | None:
    try:
        # Loading the library opens no device and initialises nothing.
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return (
            "libcuda.so.1 cannot be loaded: install an NVIDIA driver, or give the container GPUs,"
            " with `compute` in NVIDIA_DRIVER_CAPABILITIES"
        )
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return f"cuda-bindings is not installed: {INSTALL}"
    return None


@hookimpl
def kvf_transports() -> list[DeviceTransportProvider[CudaOptions]]:
    return [
        DeviceTransportProvider(
            name="cuda_ipc",
            summary="the server copies KV between NVIDIA GPUs and its shared memory",
            options=CudaOptions,
            create_engine=create_engine,
            create_copier=create_copier,
            probe=_probe,
            diagnose=_diagnose,
        )
    ]
