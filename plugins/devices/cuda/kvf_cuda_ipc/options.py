"""The options of `cuda_ipc`: the server's `[[transport]]` table, and `transport_options` of an engine."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvframework.api.driver import DeviceOptions
from kvframework.api.installing import install_command
from kvframework.api.plugin import ByteSize

# The bindings and the compiler, for the texts that miss them.
INSTALL = f"{install_command('cuda13', distribution='kvframework-cuda')}, or [cuda12] for a driver of CUDA 12"


class CudaOptions(DeviceOptions, frozen=True):
    """The options beside those of every device transport; the server's choose how it copies, an engine needs none."""

    engine: Annotated[
        Literal["auto", "dma", "kernel"],
        Meta(description="what copies: the GPU's copy engines, a kernel, or each where it is faster"),
    ] = "auto"
    kernel_below: Annotated[
        ByteSize, Meta(description="with `auto`: fragments that are smaller than this are copied by the kernel")
    ] = ByteSize(28 << 10)
    kernel_blocks: Annotated[
        int, Meta(ge=1, le=1024, description="blocks of 512 threads of the kernel: how much of the GPU it may take")
    ] = 32
