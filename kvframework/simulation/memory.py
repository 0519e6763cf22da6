"""L1 of a simulation: an arena without bytes of its own, which takes no memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable

from kvframework.api.memory import Memory
from kvframework.errors import SimulationError


class VirtualMemory(Memory):
    """All zeros."""

    fd = -1

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        try:
            self._map = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
        except (OSError, OverflowError) as error:
            raise SimulationError(
                f"L1 is too large to be simulated: {error}", where="[l1] capacity", hint="no node has as much"
            ) from None

    def start(self, on_ready: Callable[[int], None]) -> None:
        on_ready(self.capacity)

    def view(self) -> memoryview:
        return memoryview(self._map)

    def close(self) -> None:
        self._map.close()
