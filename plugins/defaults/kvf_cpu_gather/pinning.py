"""The arena, registered with the accelerator of an engine's tensors: its driver then copies by DMA, without staging.
Engine side."""

from __future__ import annotations

import logging
import threading
from typing import Any

import torch

from kvframework.api.transport import Arena

log = logging.getLogger(__name__)

_PORTABLE = 1  # for every device of the process


class PinnedArena:
    """The arena as one registered range, since no copy may touch two that were registered apart. `runtime` has
    `cudaHostRegister` and `cudaHostUnregister`. A thread makes both calls, which may take seconds, and holds the arena
    until then; meanwhile copies are slower, and right. A copy runs in a `with` block of this object."""

    def __init__(self, runtime: Any, device: torch.device, arena: Arena) -> None:
        self._ended = threading.Event()
        self._idle = threading.Condition()
        self._copies = 0
        threading.Thread(target=self._run, args=(runtime, device, arena), name="kvf-pin-arena", daemon=True).start()

    def __enter__(self) -> None:
        with self._idle:
            self._copies += 1

    def __exit__(self, *_exc: object) -> None:
        with self._idle:
            self._copies -= 1
            self._idle.notify_all()

    def end(self) -> None:
        """Have the arena unregistered once no copy runs. Never blocks. Idempotent."""
        self._ended.set()

    def _run(self, runtime: Any, device: torch.device, arena: Arena) -> None:
        try:
            # Else it is the first device, and the runtime would make a context there.
            torch.get_device_module(device).set_device(device)
            # An error is this thread's: the runtime keeps it for the next call of the same one.
            error = int(runtime.cudaHostRegister(arena.address, arena.view.nbytes, _PORTABLE))
            if error:
                log.warning("copies are slow: the server's memory is not registered with %s (error %d)", device, error)
                return
            self._ended.wait()
            with self._idle:
                self._idle.wait_for(lambda: self._copies == 0)
                runtime.cudaHostUnregister(arena.address)
        except Exception:
            log.exception("the server's memory could not be registered with %s, or unregistered", device)


def pinned(device: torch.device, arena: Arena) -> PinnedArena | None:
    """Return the arena, to be registered with the device; None where torch has no call for that, which it has for CUDA
    and ROCm, and where no further thread can be started."""
    try:
        cudart = getattr(torch.get_device_module(device), "cudart", None)
        return None if cudart is None else PinnedArena(cudart(), device, arena)
    except RuntimeError as error:
        log.warning("copies are slow: the server's memory is not registered with %s: %s", device, error)
        return None
