"""The engine-driven transport `cpu_gather`. Imported by servers without torch; only `create` needs it."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Literal

from msgspec import Meta

from kvframework.api.installing import install_command
from kvframework.api.plugin import Options
from kvframework.api.transport import EngineLink, TransferContext, TransportProvider, hookimpl
from kvframework.errors import PluginUnavailable

# The options of `cpu_gather`. They are the engine's; a server needs none.

Path = Literal["auto", "arena", "wire"]
Kernel = Literal["auto", "native", "torch"]


class CpuGatherOptions(Options, frozen=True):
    """The options; each field has its description."""

    path: Annotated[
        Path,
        Meta(
            description='path of the bytes: "arena", only shared memory; "wire", only the connection; '
            '"auto", shared memory if the engine has mapped it'
        ),
    ] = "auto"
    kernel: Annotated[
        Kernel,
        Meta(
            description='code that copies KV in host memory: "native", only the compiled kernel; "torch", torch; '
            '"auto", the compiled kernel if installed. torch copies memory of other devices'
        ),
    ] = "auto"
    threads: Annotated[
        int, Meta(ge=0, le=64, description="most threads of the compiled kernel for one large copy; 0: one per core")
    ] = 0


def _create(options: CpuGatherOptions, link: EngineLink) -> TransferContext:
    """Run in engine processes only: a server offers the transport by name and needs no torch for it, so there is no
    reason for which a probe could refuse."""
    if importlib.util.find_spec("torch") is None:
        raise PluginUnavailable("transport cpu_gather needs torch in the engine process", hint=install_command("torch"))
    from kvf_cpu_gather.context import CpuGather
    from kvf_cpu_gather.kernel import load_kernel

    kernel = None if options.kernel == "torch" else load_kernel(options.threads)
    if options.kernel == "native" and kernel is None:
        raise PluginUnavailable(
            "transport cpu_gather was installed without its compiled copy kernel",
            hint='install it with a C compiler in PATH, or set kernel = "auto"',
        )
    return CpuGather(link, options.path, kernel)


@hookimpl
def kvf_transports() -> list[TransportProvider[CpuGatherOptions]]:
    return [
        TransportProvider(
            name="cpu_gather",
            summary="the engine copies its blocks itself, over shared memory or the connection; any torch device",
            options=CpuGatherOptions,
            create=_create,
        )
    ]
