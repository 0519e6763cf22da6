"""The transport contract in an engine's process: how bytes move between an engine's memory and the server's arena.

Engine-driven transports (CPU gather) copy here and need no server half. Server-driven ones (CUDA IPC) send memory
handles at registration; their server half, see `api/server_transport.py`, copies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvframework.api.futures import Future, StreamHook
from kvframework.api.layout import KVLayout, LayerTensors, Layout
from kvframework.api.plugin import O, Provider, hookimpl
from kvframework.api.server_transport import ServerTransport
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
from kvframework.api.types import BlockIds, Buffer
from kvframework.errors import TransportMismatch

__all__ = [
    "AnyTransportProvider",
    "ArenaRange",
    "BlockIds",
    "EngineDrivenLink",
    "EngineLink",
    "GroupBlocks",
    "LoadOutcome",
    "LoadPlan",
    "Registration",
    "ServerDrivenLink",
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
