"""Owns the options of `cpu_gather`. They are the engine's; a server needs none."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvframework.api import Options

Path = Literal["auto", "arena", "wire"]
Kernel = Literal["auto", "native", "torch"]


class CpuGatherOptions(Options, frozen=True):
    """See the descriptions of the fields."""

    path: Annotated[
        Path, Meta(description="how bytes move: over the shared arena, over the wire, or the arena where it is mapped")
    ] = "auto"
    kernel: Annotated[
        Kernel,
        Meta(
            description="what copies in host memory: the compiled kernel, torch, or the kernel where it was built; "
            "memory of other devices is torch's"
        ),
    ] = "auto"
    threads: Annotated[
        int, Meta(ge=0, le=64, description="threads of the kernel for one large copy, at most; 0: one per core")
    ] = 0
