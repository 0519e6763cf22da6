"""The `Memory` contract: the shared arena in which all objects of L1 lie. Created once, in the server process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from kvframework.api.plugin import Diagnose, O, Provider, TableContext, hookimpl
from kvframework.errors import ArenaError

__all__ = ["ArenaError", "Memory", "MemoryContext", "MemoryProvider", "TableContext", "hookimpl"]


class Memory(ABC):
    """One shared segment. Objects are (offset, length) in it; the core allocates, the plugin provides the memory.

    Created once by the server. `fd` is passed to local clients, which map it; it stays owned by this object. `capacity`
    is in bytes.
    """

    fd: int
    capacity: int

    @abstractmethod
    def start(self, on_ready: Callable[[int], None]) -> None:
        """Starts making the memory usable, in the background.

        Calls `on_ready(n)` with a growing n whenever bytes `[0, n)` are resident; the core allocates only those. Does
        not block. `on_ready` is called from the plugin's own thread and returns quickly.
        """

    @abstractmethod
    def view(self) -> memoryview:
        """Returns a writable view of all bytes, valid until `close`."""

    @abstractmethod
    def close(self) -> None:
        """Ends the background work and frees the memory. Views must have been released. Idempotent."""

    def leave(self) -> None:
        """Replaces `close` where the process ends right afterwards; views may still exist. Has to release only
        resources that would outlive the process: the kernel frees its memory. By default `close`."""
        self.close()


@dataclass(frozen=True)
class MemoryContext(TableContext):
    """The table, and the memory of an earlier server to go on with. `kept` is a descriptor of the segment that `create`
    made there, with the same options, whose bytes have to stay as they are: the plugin owns it, also when it raises.
    None: a new segment. Only a provider with `keeps` gets one. `outlives`: a next server goes on with this one, and
    waits until the kernel has unmapped it at the end of this process."""

    kept: int | None = None
    outlives: bool = False


@dataclass(frozen=True, kw_only=True)
class MemoryProvider(Provider[O]):
    """The memory that `[l1] use` names. `create` raises `ArenaError` if the memory is not available. `keeps`: it takes
    `MemoryContext.kept`, so that objects outlive the server; `fd` is that of a memfd then, whose memory lasts as long
    as any process has a descriptor of it. `diagnose` as for `TierProvider`: the doctor asks it only while no server
    holds the memory."""

    kind = "memory"
    create: Callable[[O, MemoryContext], Memory]
    keeps: bool = False
    diagnose: Diagnose[O] | None = None
