"""L1 of a simulation: an arena without bytes of its own, which takes no memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable

from kvframework.api.memory import Memory


class VirtualMemory(Memory):
    """All zeros."""

    fd = -1

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._map = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)

    def start(self, on_ready: Callable[[int], None]) -> None:
        on_ready(self.capacity)

    def view(self) -> memoryview:
        return memoryview(self._map)

    def close(self) -> None:
        self._map.close()
