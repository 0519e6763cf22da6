"""The transport `opencl`: the engine's OpenCL device copies between shared virtual memory (SVM) and the shared arena.

It runs in engines; the server only offers it by name. Everything that lists plugins imports this module, so it imports
nothing heavy.
"""

from __future__ import annotations

from kvframework.api.transport import EngineLink, TransferContext, TransportProvider, hookimpl

from kvf_opencl.options import OpenclOptions


def _create(options: OpenclOptions, link: EngineLink) -> TransferContext:
    """Raises `DeviceError` where the device cannot be used; an engine's `auto` then takes the next transport."""
    from kvf_opencl.context import OpenclContext
    from kvf_opencl.runtime import runtime

    return OpenclContext(link, runtime(options.platform))


def probe() -> str | None:
    """The reason why it cannot run here, or None."""
    try:
        from kvf_opencl.runtime import platforms

        return None if platforms() else "no OpenCL platform here has SVM"
    except Exception as error:  # a missing library, or no driver
        return f"no OpenCL platform here: {error}"


@hookimpl
def kvf_transports() -> list[TransportProvider[OpenclOptions]]:
    """The provider of this transport."""
    return [
        TransportProvider(
            name="opencl",
            summary="the engine's OpenCL device copies between SVM and the shared arena",
            options=OpenclOptions,
            create=_create,
            is_gpu=True,
            probe=probe,
        )
    ]
