"""Owns how an engine's events and streams are told from what is none: torch's, those of cuda.core, plain handles."""

from __future__ import annotations

from kvf_cuda_ipc.driver import Event, RawStream
from kvframework.errors import DeviceError


def event_of(ready: object) -> Event:
    """The `CUevent` of what an engine gave with a submit: `torch.cuda.Event`, `torch.Event`, an event of cuda.core, or
    an integer. Raises `DeviceError` for anything else, and for one that was never recorded: it would be reached at
    once, a copy too early."""
    for attribute in ("cuda_event", "event_id", "handle"):
        found = getattr(ready, attribute, None)
        if found is not None:
            return Event(_handle(found, ready))
    if isinstance(ready, int) and not isinstance(ready, bool):
        return Event(_handle(ready, ready))
    raise DeviceError(
        f"the engine's event is a {type(ready).__name__}", where="cuda_ipc",
        available="None, torch.cuda.Event, torch.Event, an event of cuda.core, a CUevent as an integer",
    )  # fmt: skip


def stream_of(stream: object) -> RawStream:
    """The `CUstream` of `torch.cuda.Stream`, of anything with `__cuda_stream__`, or of an integer; 0 is the legacy
    default stream. Raises `DeviceError` for anything else."""
    found = getattr(stream, "cuda_stream", None)
    if found is not None:
        return RawStream(int(found))
    protocol = getattr(stream, "__cuda_stream__", None)
    if callable(protocol):
        _version, handle = protocol()
        return RawStream(int(handle))
    if isinstance(stream, int) and not isinstance(stream, bool):
        return RawStream(stream)
    raise DeviceError(
        f"the stream is a {type(stream).__name__}", where="cuda_ipc",
        available="None, torch.cuda.Stream, a stream of cuda.core, a CUstream as an integer",
    )  # fmt: skip


def _handle(found: object, of: object) -> int:
    handle = int(found)  # type: ignore[call-overload]
    if handle <= 0:
        raise DeviceError(
            f"the engine's {type(of).__name__} was never recorded", where="cuda_ipc",
            hint="record it behind the work that fills the blocks, then submit",
        )  # fmt: skip
    return handle  # type: ignore[no-any-return]
