"""The transport contract in the server: the half of a server-driven transport that copies between engine memory and
arena."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from kvframework.api.futures import Future
from kvframework.api.layout import KVLayout, MemoryLayoutDesc
from kvframework.api.requests import ClientInfo
from kvframework.api.transfer import ArenaRange, GroupBlocks
from kvframework.errors import KVFrameworkError

__all__ = [
    "CopyJob",
    "ServerContext",
    "ServerTransport",
]


class CopyJob:
    """One server-driven STORE or RETRIEVE, made and checked by the core, carried out by a transport's server half.

    `ranges` are in `arena`. `blocks` are by layer group, below the registered number of blocks; a `NO_BLOCK` among
    their ids must not be touched. `event` is the handle that the engine half sent. `cancelled` is set once the copy is
    no longer wanted.
    """

    __slots__ = ("_on_cancel", "arena", "blocks", "cancelled", "event", "is_store", "ranges", "skip_tokens")

    def __init__(
        self,
        *,
        is_store: bool,
        arena: memoryview,
        ranges: Sequence[ArenaRange],
        blocks: Sequence[GroupBlocks],
        event: bytes,
        skip_tokens: int = 0,
    ) -> None:
        self.is_store = is_store
        self.arena = arena
        self.ranges = ranges
        self.blocks = blocks
        self.event = event
        self.skip_tokens = skip_tokens
        self.cancelled = threading.Event()
        self._on_cancel: Callable[[], None] | None = None

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Registers a cancel callback: it runs in the cancelling thread, immediately if the job is cancelled already,
        possibly twice. It must not block."""
        self._on_cancel = callback
        if self.cancelled.is_set():
            self.cancel()

    def cancel(self) -> None:
        """Asks the transport to stop; the copy's future resolves as always."""
        self.cancelled.set()
        callback, self._on_cancel = self._on_cancel, None
        if callback is not None:
            callback()


class ServerContext(ABC):
    """The server half of one instance: the engine's memory, opened. Called from the serving thread; must not block."""

    @abstractmethod
    def copy(self, job: CopyJob) -> Future[bool]:
        """Starts the copy. The future resolves only once the job's blocks and ranges are no longer touched, whether it
        succeeded (True), failed (False or an error) or saw `job.cancelled` (False)."""

    @abstractmethod
    def close(self) -> None:
        """Closes the mappings at once; copies in flight resolve first. Idempotent."""

    def when_open(self) -> Future[None] | None:
        """Returns a future that is resolved once the engine's memory is open, or fails with the reason why it is not;
        None if the memory is open already."""
        return None

    def when_closed(self) -> Future[None] | None:
        """Returns, after `close`, a future that is resolved once none of the engine's memory is mapped; None if none
        is."""
        return None

    def failure(self) -> KVFrameworkError | None:
        """Returns the error for which no copy is possible any more, so that the instance must register again; None
        while there is none."""
        return None


class ServerTransport(ABC):
    """The server half of a server-driven transport, one per server."""

    @abstractmethod
    def open(
        self, client: ClientInfo, layout: KVLayout, desc: MemoryLayoutDesc, handles: Sequence[bytes]
    ) -> ServerContext:
        """Opens the memory handles of one of `client`'s instances. Raises `RequestError` if they are malformed. Called
        from the serving thread; slow work continues behind `ServerContext.when_open`."""

    def status(self) -> dict[str, object]:
        """Returns the transport's part of the status document, plain values of JSON. Under `counters`, its own:
        what `kvframework.api.counter.Counts.status` returns. Called from any thread; must not block."""
        return {}

    @abstractmethod
    def close(self) -> None: ...
