"""Owns the options of `cuda_ipc`: the server's `[[transport]]` table, and `transport_options` of an engine."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvframework.api.driver import DeviceOptions
from kvframework.api.options import ByteSize


class CudaOptions(DeviceOptions, frozen=True):
    """Beside what every device transport has; the server's say how it copies, an engine needs none."""

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
