"""The transport contract, in an engine's process and in the server: how bytes move between an engine's memory and the
server's arena.

Engine-driven transports (CPU gather) copy here and need no server half. Server-driven ones (CUDA IPC) send memory
handles at registration; their server half, `ServerTransport`, copies.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvframework.api.futures import Future, StreamHook
from kvframework.api.layout import KVLayout, LayerTensors, Layout, MemoryLayoutDesc
from kvframework.api.plugin import BlockIds, Buffer, O, Provider, hookimpl
from kvframework.api.requests import ClientInfo
from kvframework.api.transfer import (
    ArenaRange,
    GroupBlocks,
    LoadOutcome,
    LoadPlan,
    Registration,
    StoreOutcome,
    StorePlan,
    Transfer,
    error_code,
)
from kvframework.errors import KVFrameworkError, TransportMismatch

__all__ = [
    "AnyTransportProvider",
    "ArenaRange",
    "BlockIds",
    "CopyJob",
    "EngineDrivenLink",
    "EngineLink",
    "GroupBlocks",
    "LoadOutcome",
    "LoadPlan",
    "Registration",
    "ServerContext",
    "ServerDrivenLink",
    "ServerTransport",
    "StoreOutcome",
    "StorePlan",
    "Transfer",
    "TransferContext",
    "TransportProvider",
    "error_code",
    "hookimpl",
]

# The kinds of a client's losses.
LostKind = Literal["lookups", "loads", "stores"]


class EngineDrivenLink(ABC):
    """The server as an engine-driven transport sees it. Thread-safe.

    A call that returns a future waits for the answer only briefly (50 ms, and not again while the server is slow): most
    often the future it returns is resolved. Else the future resolves by the deadline of its kind, seconds later, and a
    transport should not hold up the engine's thread for that long. Futures fail with `KVFrameworkError`
    (`DeadlineExceeded`, `ServerGone`, a typed refusal) unless documented otherwise. `cancel` on the future of a
    `prepare` gives back ranges and pins that the answer may still reserve.
    """

    @property
    @abstractmethod
    def maps_arena(self) -> bool:
        """Whether the server's arena is mapped in this process now; it cannot be over TCP."""

    def map_ahead(self) -> None:
        """For a transport that copies to and from the arena in this process: has the pages that the server's memory
        holds mapped here, in the background, so that no copy waits for it. Also at servers to come. Never blocks, does
        nothing where the arena is not mapped. By default nothing."""
        return

    @abstractmethod
    def prepare_store(self, transfer: Transfer) -> Future[StorePlan]:
        """Reserves ranges for the objects that the server lacks. Fails with `ServerGone` where the arena is not
        mapped."""

    @abstractmethod
    def prepare_load(self, transfer: Transfer) -> Future[LoadPlan]:
        """Pins all objects that the load needs; a plan without ranges is a miss."""

    # The wire path, where the arena is not mapped: the same objects, as raw buffers. The bulk has a socket of its own.

    def missing_chunks(self, transfer: Transfer) -> Future[list[int]]:
        """Returns which of the transfer's objects the server lacks, ascending. Objects count chunk by chunk from
        `key.start`, and within a chunk by layer group."""
        raise TransportMismatch(f"{type(self).__name__} moves no bytes over the wire")

    def store_chunks(
        self, transfer: Transfer, objects: Sequence[int], buffers: Sequence[Buffer]
    ) -> Future[StoreOutcome]:
        """Sends one buffer for each of `objects` (ascending); a stored object is a hit from then on. At most 256 MiB
        and 4096 buffers a call. Does not wait for the answer, but may wait for a handshake at first.

        Nothing is copied: the buffers belong to the call until the future has a result. After a failure they may still
        be read, for as long as there is a reference to them: drop them, never write to them again.
        """
        raise TransportMismatch(f"{type(self).__name__} moves no bytes over the wire")


class ServerDrivenLink(ABC):
    """The server as the engine half of a server-driven transport sees it. Thread-safe.

    The futures of transfers resolve once the server no longer touches the blocks and never fail; `cancel` sends CANCEL.
    `event` is the transport's own handle of an event that the server half waits for; `stream_hook` blocks a stream of
    the engine until the future is resolved, see `EngineDriver.block_stream`.
    """

    @abstractmethod
    def store(
        self, transfer: Transfer, *, event: bytes = b"", stream_hook: StreamHook | None = None
    ) -> Future[StoreOutcome]:
        """Sends STORE; never waits. Raises `BadBlockIds` for ids that cannot be sent."""

    @abstractmethod
    def load(
        self, transfer: Transfer, skip_tokens: int, *, event: bytes = b"", stream_hook: StreamHook | None = None
    ) -> Future[LoadOutcome]:
        """Sends RETRIEVE; never waits. Raises as `store` does."""

    @abstractmethod
    def gather_block(self, registration: Registration, blocks: Sequence[int], event: bytes) -> list[bytes]:
        """Returns one block per layer group, gathered by the server half, see `TransferContext.gather_block`. Blocks
        for a few seconds at most."""


class EngineLink(EngineDrivenLink, ServerDrivenLink):
    """The link that `TransportProvider.create` gets: both kinds, of which a transport uses one."""


class TransferContext(ABC):
    """The engine half of a transport, one per registered instance. Called from the engine's own thread.

    Returns futures and never polls or keeps them. An error that `store` and `load` raise, or with which a future fails,
    is a miss that the core logs and counts; only `BadLayout` and `BadBlockIds`, for tensors and blocks that differ from
    the registered ones, reach the engine.
    """

    def on_layout(self, layout: Layout, declared: KVLayout) -> None:
        """Receives the declaration of the tensors before each `memory_handles`: for transports that export them."""
        del layout, declared

    def memory_handles(self, kv_caches: Mapping[str, LayerTensors]) -> tuple[bytes, ...]:
        """Returns the handles by which the server half reaches the engine's memory; () for an engine-driven
        transport."""
        del kv_caches
        return ()

    def on_registered(self, registration: Registration, layout: Layout) -> None:
        """Called after every successful registration, including a reconnect's. Raises `BadLayout` or
        `TransportMismatch` for what it cannot move: the registration is taken back, and `auto` takes the next
        transport."""
        del registration, layout

    @abstractmethod
    def store(self, transfer: Transfer) -> Future[StoreOutcome]:
        """Stores the transfer's tokens. The future is resolved once the blocks are no longer read."""

    @abstractmethod
    def load(self, transfer: Transfer, skip_tokens: int) -> Future[LoadOutcome]:
        """Loads the transfer's tokens except the first `skip_tokens`, fewer than there are, whose slots are not
        written. Opaque blocks are skipped whole; a state is always written. The future is resolved once the blocks are
        no longer touched. A transport that copies in this thread should do so in `Future.advance` if the load is
        `in_pieces`: what the engine computes waits for no more than a piece then."""

    @abstractmethod
    def close(self) -> None:
        """Frees the context's resources. Idempotent."""

    def gather_block(self, kv_caches: Mapping[str, LayerTensors], blocks: Sequence[int]) -> list[bytes]:
        """Returns one block per layer group (`blocks`), through the path that stores take, as the bytes of its
        canonical form `[planes, layers, slots per block, hidden]`. Blocking; only for the canary at registration.

        Server-driven transports answer with `ServerDrivenLink.gather_block`, engine-driven ones gather by themselves.
        """
        raise TransportMismatch(
            f"{type(self).__name__} cannot gather a block for the canary", hint="implement gather_block"
        )


@dataclass(frozen=True, kw_only=True)
class AnyTransportProvider(Provider[O]):
    """The common base of both descriptors of a transport. `is_gpu` says whether it moves the memory of an
    accelerator."""

    kind = "transport"
    is_gpu: bool = False


@dataclass(frozen=True, kw_only=True)
class TransportProvider(AnyTransportProvider[O]):
    """A transport. `create` makes the engine half. `create_server(options, arena_fd)` makes the server half, None for
    an engine-driven transport; `arena_fd` is the arena's descriptor, borrowed until the half is closed."""

    create: Callable[[O, EngineLink], TransferContext]
    create_server: Callable[[O, int], ServerTransport] | None = None


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
