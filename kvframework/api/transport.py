"""The transport contract in an engine's process: how bytes move between an engine's memory and the server's arena.

Engine-driven transports (CPU gather) copy here and need no server half. Server-driven ones (CUDA IPC) send memory
handles at registration; their server half, see `api/server_transport.py`, copies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvframework.api.futures import Future, StreamHook
from kvframework.api.keys import CacheKey
from kvframework.api.layout import KVLayout, LayerTensors, Layout, MemoryLayoutDesc
from kvframework.api.plugin import O, Provider, hookimpl
from kvframework.api.types import BlockIds, Buffer, Message
from kvframework.errors import KVFrameworkError, TransportMismatch

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from kvframework.api.server_transport import ServerTransport

__all__ = [
    "AnyTransportProvider",
    "ArenaRange",
    "BlockIds",
    "EngineDrivenLink",
    "EngineLink",
    "GroupBlocks",
    "LoadOutcome",
    "LoadPlan",
    "LostKind",
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


class ArenaRange(Message, frozen=True, array_like=True):
    """One object's place in the arena, in bytes; `chunk` counts from the key's `start`."""

    chunk: int
    group: int
    offset: int
    length: int


def error_code(error: BaseException) -> str:
    """Returns the stable code of a framework's error, "error" for any other."""
    return error.code if isinstance(error, KVFrameworkError) else "error"


class StoreOutcome(Message, frozen=True):
    """The outcome of a STORE: objects by result, counted over chunks x layer groups.

    `unknown` objects were written, and their COMMIT was not answered. `error` is the code of the error for which
    objects were dropped or are unknown, "" if there was none (a full L1 drops without one). True in a condition if
    `ok`.
    """

    stored: int = 0
    present: int = 0
    in_flight: int = 0
    dropped: int = 0
    unknown: int = 0
    error: str = ""

    @property
    def ok(self) -> bool:
        """True if every object is or will be a hit."""
        return self.dropped == 0 and self.unknown == 0

    def __bool__(self) -> bool:
        return self.ok

    def __add__(self, other: StoreOutcome) -> StoreOutcome:
        """Returns the sum of both; its error is the first of the two."""
        return StoreOutcome(
            self.stored + other.stored,
            self.present + other.present,
            self.in_flight + other.in_flight,
            self.dropped + other.dropped,
            self.unknown + other.unknown,
            self.error or other.error,
        )


class LoadOutcome(Message, frozen=True):
    """The outcome of a load: if it is `ok` the blocks hold the requested KV, else any content, and must be computed.

    `reason` is the cause of a miss, in words; `error` is the code of the error, "" for a plain miss. True in a
    condition if `ok`: so a truth test never takes a miss for a hit.
    """

    ok: bool
    reason: str = ""
    error: str = ""

    def __bool__(self) -> bool:
        return self.ok

    @classmethod
    def failed(cls, error: BaseException) -> LoadOutcome:
        """The outcome of a load that ended with an error."""
        return cls(False, str(error), error_code(error))


class Registration(Message, frozen=True):
    """The engine side's knowledge of its own instance once the server accepted it."""

    instance_id: int
    rank: int
    namespace: bytes
    layout: KVLayout
    desc: MemoryLayoutDesc


class GroupBlocks(NamedTuple):
    """The blocks of one layer group of a transfer.

    `ids` are the blocks of the objects, object by object, `per_object` to each: all blocks of a chunk, of a state only
    the last one. Every id but `NO_BLOCK` is a block of the engine, `highest` at most (-1: none is touched). The first
    `first` ids are `NO_BLOCK`: a store leaves these objects out, a load does not write these blocks.
    """

    ids: Sequence[int]
    per_object: int
    first: int
    highest: int

    @property
    def first_chunk(self) -> int:
        """The first chunk with a touched block."""
        return self.first // self.per_object


@dataclass(frozen=True, eq=False)
class Transfer:
    """One STORE or load of whole chunks, checked by the core: nothing of it needs another check.

    `key` names the tokens `[key.start, key.end)`, `blocks` the engine's blocks that hold them, a `GroupBlocks` per
    layer group; `block_ids` are the ids as passed by the engine, one list per layer group for all tokens. `kv_caches`
    are the engine's tensors, borrowed until the transfer's future is resolved. `event` is the engine's own event behind
    the work that the copy has to wait for, None for the work in the calling thread's current stream.
    """

    key: CacheKey
    registration: Registration
    kv_caches: Mapping[str, LayerTensors]
    block_ids: BlockIds
    blocks: Sequence[GroupBlocks]
    event: torch.Event | None = None

    @property
    def request_id(self) -> str:
        return self.key.request_id

    @property
    def tokens(self) -> int:
        return self.key.end - self.key.start

    @property
    def chunks(self) -> int:
        return self.tokens // self.registration.desc.chunk_tokens

    @property
    def objects(self) -> int:
        """The number of objects: chunks x layer groups."""
        return self.chunks * len(self.blocks)

    @property
    def nbytes(self) -> int:
        """The bytes of all objects."""
        return self.chunks * self.registration.desc.nbytes

    @property
    def first_chunks(self) -> tuple[int, ...]:
        """The first touched chunk per layer group: the chunks before it are not stored."""
        return tuple(each.first_chunk for each in self.blocks)

    def blocks_of(self, place: ArenaRange) -> Sequence[int]:
        """Returns the block ids of one object, in its order."""
        blocks = self.blocks[place.group]
        return blocks.ids[place.chunk * blocks.per_object : (place.chunk + 1) * blocks.per_object]

    def failed(self, error: BaseException) -> StoreOutcome:
        """Returns the outcome of a store that stored nothing."""
        return StoreOutcome(dropped=self.objects, error=error_code(error))


class StorePlan:
    """The answer to a prepared store: the caller writes each of `ranges` in `arena`, then calls `commit`.

    `with plan:` aborts at its end unless `commit` was called. The ranges lie in `arena`, are objects of the transfer
    that the engine holds, and belong to the caller until COMMIT, ABORT or its end; after their lease they are
    quarantined: the caller may still write them, but they are never published. `outcome` is that of the other objects.
    `arena` stays valid as long as there is a reference to it or to a tensor made from it: never release it.
    """

    def __init__(
        self,
        arena: memoryview,
        ranges: Sequence[ArenaRange],
        outcome: StoreOutcome,
        *,
        commit: Callable[[], Future[StoreOutcome]],
        abort: Callable[[], object],
    ) -> None:
        self.arena = arena
        self.ranges = ranges
        self.outcome = outcome
        self._commit = commit
        self._abort = abort
        self._is_open = bool(ranges)

    def __enter__(self) -> StorePlan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def commit(self) -> Future[StoreOutcome]:
        """Publishes the ranges. The future has the outcome of all objects of the transfer and never fails: ranges that
        were not published count as dropped, and after a `DeadlineExceeded` as unknown (the server publishes them when
        it handles the request, and nothing stays reserved)."""
        if not self._is_open:
            return Future.resolved(self.outcome)
        self._is_open = False
        return self._commit()

    def abort(self) -> None:
        """Gives the ranges back, unless they were committed. Idempotent; never blocks, never raises."""
        if self._is_open:
            self._is_open = False
            self._abort()


class LoadPlan:
    """The answer to a prepared load: the caller reads each of `ranges`, then calls `commit`. No ranges if `hit` is
    False.

    `with plan:` gives the pins back at its end unless `commit` was called. The ranges lie in `arena` and are pinned for
    a while; `commit` says whether they stayed pinned throughout. `arena` is like that of a `StorePlan`; it is empty
    where the arena is not mapped, see `receive`.
    """

    def __init__(
        self,
        arena: memoryview,
        ranges: Sequence[ArenaRange],
        *,
        reason: str = "",
        commit: Callable[[], Future[LoadOutcome]],
        abort: Callable[[], object],
        receive: Callable[[Sequence[int]], Future[Sequence[memoryview]]],
    ) -> None:
        self.arena = arena
        self.ranges = ranges
        self.hit = bool(ranges)
        self.reason = reason
        self._commit = commit
        self._abort = abort
        self._receive = receive
        self._is_open = self.hit

    def __enter__(self) -> LoadPlan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def receive(self, positions: Sequence[int]) -> Future[Sequence[memoryview]]:
        """Returns the bytes of `ranges` at `positions` over the wire, a buffer each; an empty sequence if the pins have
        lapsed. Bounds and waiting as for `EngineDrivenLink.store_chunks`. The caller owns the buffers; their content is
        only known to be right once `commit` has confirmed the pins."""
        return self._receive(positions)

    def commit(self) -> Future[LoadOutcome]:
        """Ends the pins. The future never fails: it has a miss if the pins did not last throughout, since the bytes
        read may be foreign, or if the server did not answer."""
        if not self._is_open:
            return Future.resolved(LoadOutcome(False, self.reason))
        self._is_open = False
        return self._commit()

    def abort(self) -> None:
        """Gives the pins back. Idempotent; never blocks, never raises."""
        if self._is_open:
            self._is_open = False
            self._abort()


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

    @abstractmethod
    def prepare_store(self, transfer: Transfer) -> Future[StorePlan]:
        """Reserves ranges for the objects that the server lacks. Fails with `TransportMismatch` where the arena is not
        mapped."""

    @abstractmethod
    def prepare_load(self, transfer: Transfer) -> Future[LoadPlan]:
        """Pins all objects that the load needs; a plan without ranges is a miss."""

    # The wire path, where the arena is not mapped: the same objects, as raw buffers. Bulk data has a socket of its own.

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
    is a miss that the core logs and counts; only `BadLayout`, `BadBlockIds` and `TransportMismatch`, for tensors that
    differ from the registered ones, reach the engine.
    """

    def on_layout(self, layout: Layout, declared: KVLayout) -> None:
        """Receives the declaration of the tensors before the first `memory_handles`: for transports that export
        them."""
        del layout, declared

    def memory_handles(self, kv_caches: Mapping[str, LayerTensors]) -> tuple[bytes, ...]:
        """Returns the handles by which the server half reaches the engine's memory; () for an engine-driven
        transport."""
        del kv_caches
        return ()

    def on_registered(self, registration: Registration, layout: Layout) -> None:
        """Called after every successful registration, including a reconnect's. May raise `BadLayout`."""
        del registration, layout

    @abstractmethod
    def store(self, transfer: Transfer) -> Future[StoreOutcome]:
        """Stores the transfer's tokens. The future is resolved once the blocks are no longer read."""

    @abstractmethod
    def load(self, transfer: Transfer, skip_tokens: int) -> Future[LoadOutcome]:
        """Loads the transfer's tokens except the first `skip_tokens`, fewer than there are, whose slots are not
        written. Opaque blocks are skipped whole; a state is always written. The future is resolved once the blocks are
        no longer touched."""

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
