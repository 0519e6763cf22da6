"""The options of `cpu_gather`. They are the engine's; a server needs none."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvframework.api.options import Options

Path = Literal["auto", "arena", "wire"]
Kernel = Literal["auto", "native", "torch"]


class CpuGatherOptions(Options, frozen=True):
    """The options; each field has its description."""

    path: Annotated[
        Path,
        Meta(
            description='how bytes move: "arena", over shared memory or not at all; "wire", always over the wire; '
            '"auto", over the arena where it is mapped'
        ),
    ] = "auto"
    kernel: Annotated[
        Kernel,
        Meta(
            description='what copies in host memory: "native", the compiled kernel or nothing; "torch", torch; '
            '"auto", the kernel where it was built. Memory of other devices goes through torch'
        ),
    ] = "auto"
    threads: Annotated[
        int, Meta(ge=0, le=64, description="threads of the kernel for one large copy, at most; 0: one per core")
    ] = 0
