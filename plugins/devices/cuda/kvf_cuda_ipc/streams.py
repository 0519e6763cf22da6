"""The conversion of an engine's events and streams to CUDA's: torch's, those of cuda.core, plain handles."""

from __future__ import annotations

import contextlib

from kvf_cuda_ipc.driver import Event, RawStream
from kvframework.errors import DeviceError


def event_of(ready: object) -> Event:
    """Return the `CUevent` of the event that an engine gave with a submit: `torch.cuda.Event`, `torch.Event`, an event
    of cuda.core, or an integer. Raises `DeviceError` for anything else, and for one without a handle, which torch makes
    at the first record. An event with a handle that was never recorded cannot be recognised: it is reached at once, a
    copy too early."""
    for attribute in ("cuda_event", "event_id", "handle"):
        found = getattr(ready, attribute, None)
        if found is not None:
            return Event(_recorded(found, ready))
    if isinstance(ready, int) and not isinstance(ready, bool):
        return Event(_recorded(ready, ready))
    raise DeviceError(
        f"the engine's event is a {type(ready).__name__}",
        where="cuda_ipc",
        available="None, torch.cuda.Event, torch.Event, an event of cuda.core, a CUevent as an integer",
    )


def stream_of(stream: object) -> RawStream:
    """Return the `CUstream` of `torch.cuda.Stream`, of anything with `__cuda_stream__`, or of an integer; 0 is the
    legacy default stream. Raises `DeviceError` for anything else."""
    found = getattr(stream, "cuda_stream", None)
    if found is not None:
        return RawStream(_handle(found, stream))
    protocol = getattr(stream, "__cuda_stream__", None)
    if callable(protocol):
        _version, handle = protocol()
        return RawStream(_handle(handle, stream))
    if isinstance(stream, int) and not isinstance(stream, bool):
        return RawStream(_handle(stream, stream))
    raise DeviceError(
        f"the stream is a {type(stream).__name__}",
        where="cuda_ipc",
        available="None, torch.cuda.Stream, a stream of cuda.core, a CUstream as an integer",
    )


def _recorded(found: object, event: object) -> int:
    handle = _handle(found, event)
    if handle == 0:
        raise DeviceError(
            f"the engine's {type(event).__name__} was never recorded",
            where="cuda_ipc",
            hint="record it behind the work that fills the blocks, then submit",
        )
    return handle


def _handle(found: object, of: object) -> int:
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        handle = int(found)  # type: ignore[call-overload]
        if 0 <= handle < 1 << 64:
            return handle  # type: ignore[no-any-return]
    raise DeviceError(
        f"the handle of the engine's {type(of).__name__} is none of the driver's",
        where="cuda_ipc",
        available="0 to 2**64 - 1",
    )
