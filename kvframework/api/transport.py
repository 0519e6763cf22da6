"""The transport contract in an engine's process: how bytes move between an engine's memory and the server's arena.

Engine-driven transports (CPU gather) copy here and need no server half. Server-driven ones (CUDA IPC) send memory
handles at registration; their server half, see `api/server_transport.py`, copies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvframework.api.futures import Future, StreamHook
from kvframework.api.keys import CacheKey
from kvframework.api.layout import KVLayout, LayerTensors, Layout, MemoryLayoutDesc
from kvframework.api.plugin import O, Provider, hookimpl
from kvframework.api.server_transport import ServerTransport
from kvframework.api.types import ArenaRange, BlockIds, Buffer, GroupBlocks, Message
from kvframework.errors import KVFrameworkError, TransportMismatch

if TYPE_CHECKING:
    from types import TracebackType

    import torch

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

# What a client can lose.
LostKind = Literal["lookups", "loads", "stores"]


def error_code(error: BaseException) -> str:
    """The stable code of a framework's error, "error" for any other."""
    return error.code if isinstance(error, KVFrameworkError) else "error"


class StoreOutcome(Message, frozen=True):
    """What a STORE did with each object: counts over chunks x layer groups.

    `unknown` were written, and their COMMIT was not answered. `error` is the code of the error for which objects were
    dropped or are unknown, "" if there was none (a full L1 drops without one). True in a condition if `ok`.
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
        """What became of the objects of both; the first error of the two."""
        return StoreOutcome(
            self.stored + other.stored,
            self.present + other.present,
            self.in_flight + other.in_flight,
            self.dropped + other.dropped,
            self.unknown + other.unknown,
            self.error or other.error,
        )


class LoadOutcome(Message, frozen=True):
    """Whether a load's blocks hold what was asked for; if not, they hold anything and must be computed.

    `reason` says why not, in words; `error` is the code of the error, "" for a plain miss. True in a condition if
    `ok`: an outcome that is taken for a bool never turns a miss into a hit.
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
    """What the engine side knows of its own instance once the server accepted it."""

    instance_id: int
    rank: int
    namespace: bytes
    layout: KVLayout
    desc: MemoryLayoutDesc


@dataclass(frozen=True, eq=False)
class Transfer:
    """One STORE or load of whole chunks, checked by the core: nothing of it needs another check.

    `key` names the tokens `[key.start, key.end)`, `blocks` what of the engine's memory holds them, a `GroupBlocks` per
    layer group; `block_ids` are the ids as the engine gave them, one list per layer group for all tokens. `kv_caches`
    are the engine's tensors, borrowed until the transfer's future is resolved. `event` is the engine's own event behind
    the work that the copy has to wait for, None for what the calling thread's current stream holds.
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
        """Per layer group the first chunk of which anything is touched: the chunks before it are not stored."""
        return tuple(each.first_chunk for each in self.blocks)

    def blocks_of(self, place: ArenaRange) -> Sequence[int]:
        """The block ids of one object, in its order."""
        blocks = self.blocks[place.group]
        return blocks.ids[place.chunk * blocks.per_object : (place.chunk + 1) * blocks.per_object]

    def failed(self, error: BaseException) -> StoreOutcome:
        """The outcome of a store of which nothing was stored."""
        return StoreOutcome(dropped=self.objects, error=error_code(error))


class StorePlan:
    """The answer to a prepared store: write each of `ranges` in `arena`, then `commit`.

    `with plan:` aborts at its end unless `commit` was called. The ranges lie in `arena`, are objects of the transfer
    that the engine holds, and belong to the caller until COMMIT, ABORT or its end; after their lease they are
    quarantined: still the caller's to write, but never published. `outcome` is what became of the other objects.
    `arena` is good as long as somebody refers to it or to a tensor made from it: never release it.
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
        """Publishes the ranges. The future has what became of all objects of the transfer and never fails: what was
        not published counts as dropped, and after a `DeadlineExceeded` as unknown (the server publishes it when it
        comes to it, and nothing stays reserved)."""
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
    """The answer to a prepared load: read each of `ranges`, then `commit`. No ranges if `hit` is False.

    `with plan:` gives the pins back at its end unless `commit` was called. The ranges lie in `arena` and are pinned
    for a while; `commit` says whether they were throughout. `arena` is as that of a `StorePlan`; it is empty where the
    arena is not mapped, see `receive`.
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
        """The bytes of `ranges` at `positions` over the wire, a buffer each; an empty sequence if the pins have lapsed.
        Bounds and waiting as for `EngineDrivenLink.store_chunks`. The buffers are the caller's and hold what was sent,
        which is only known to be right once `commit` has said so."""
        return self._receive(positions)

    def commit(self) -> Future[LoadOutcome]:
        """Ends the pins. The future never fails: it has a miss if they did not hold throughout, since what was read may
        be foreign bytes, or if the server did not say so."""
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

    A call that returns a future waits for the answer a moment only (50 ms, and not again while the server is slow):
    most often the future is resolved. Else it resolves by the deadline of its kind, seconds later, and a transport
    should not hold up the engine's thread for that long. Futures fail with `KVFrameworkError` (`DeadlineExceeded`,
    `ServerGone`, a typed refusal) unless they are said not to. `cancel` on the future of a `prepare` gives back what
    the answer may still reserve.
    """

    @property
    @abstractmethod
    def maps_arena(self) -> bool:
        """Whether the server's arena is mapped in this process now; it cannot be over TCP."""

    @abstractmethod
    def prepare_store(self, transfer: Transfer) -> Future[StorePlan]:
        """Reserves ranges for what the server lacks. Fails with `TransportMismatch` where the arena is not mapped."""

    @abstractmethod
    def prepare_load(self, transfer: Transfer) -> Future[LoadPlan]:
        """Pins all that the load needs; a plan without ranges is a miss."""

    # The wire path, where the arena is not mapped: the same objects, as raw buffers. The bulk has a socket of its own.

    def missing_chunks(self, transfer: Transfer) -> Future[list[int]]:
        """Which of the transfer's objects the server lacks, ascending. Objects count chunk by chunk from `key.start`,
        in each chunk by layer group."""
        raise TransportMismatch(f"{type(self).__name__} moves no bytes over the wire")

    def store_chunks(
        self, transfer: Transfer, objects: Sequence[int], buffers: Sequence[Buffer]
    ) -> Future[StoreOutcome]:
        """Sends one buffer for each of `objects` (ascending); what is stored then is a hit. At most 256 MiB and 4096
        buffers a call. Does not wait for the answer, but may wait for a handshake at first.

        Nothing is copied: the buffers belong to the call until the future has a result. When it fails they still may be
        read, for as long as somebody refers to them: give them up, never write to them again.
        """
        raise TransportMismatch(f"{type(self).__name__} moves no bytes over the wire")


class ServerDrivenLink(ABC):
    """The server as the engine half of a server-driven transport sees it. Thread-safe.

    The futures of transfers resolve once the server touches the blocks no more and never fail; `cancel` sends CANCEL.
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
        """Has the server half gather one block per layer group, see `TransferContext.gather_block`. Waits for it, a few
        seconds at most."""


class EngineLink(EngineDrivenLink, ServerDrivenLink):
    """What `TransportProvider.create` gets: both, of which a transport uses one."""


class TransferContext(ABC):
    """The engine half of a transport, one per registered instance. Called from the engine's own thread.

    Returns futures and never polls or keeps them. What `store` and `load` raise, and what a future fails with, is a
    miss that the core logs and counts; only `BadLayout`, `BadBlockIds` and `TransportMismatch`, for tensors that are
    not those of the registration, reach the engine.
    """

    def on_layout(self, layout: Layout, declared: KVLayout) -> None:
        """Called before the first `memory_handles`, with what the tensors are: for transports that export them."""
        del layout, declared

    def memory_handles(self, kv_caches: Mapping[str, LayerTensors]) -> tuple[bytes, ...]:
        """What the server half needs to reach the engine's memory; () for an engine-driven transport."""
        del kv_caches
        return ()

    def on_registered(self, registration: Registration, layout: Layout) -> None:
        """Called after every successful registration, a reconnect's too. May raise `BadLayout`."""
        del registration, layout

    @abstractmethod
    def store(self, transfer: Transfer) -> Future[StoreOutcome]:
        """Stores the transfer's tokens. Resolved once its blocks are read no more."""

    @abstractmethod
    def load(self, transfer: Transfer, skip_tokens: int) -> Future[LoadOutcome]:
        """Loads the transfer's tokens but the first `skip_tokens`, fewer than there are, whose slots are not written.
        Opaque blocks are skipped whole; a state is written in any case. Resolved once its blocks are touched no
        more."""

    @abstractmethod
    def close(self) -> None:
        """Frees what the context holds. Idempotent."""

    def gather_block(self, kv_caches: Mapping[str, LayerTensors], blocks: Sequence[int]) -> list[bytes]:
        """One block per layer group (`blocks`), through the path that stores take, as the bytes of its canonical form
        `[planes, layers, slots per block, hidden]`. Blocking; only for the canary at registration.

        Server-driven transports answer with `ServerDrivenLink.gather_block`, engine-driven ones gather by themselves.
        """
        raise TransportMismatch(
            f"{type(self).__name__} cannot gather a block for the canary", hint="implement gather_block"
        )


@dataclass(frozen=True, kw_only=True)
class AnyTransportProvider(Provider[O]):
    """What both descriptors of a transport hold. `is_gpu` says whether it moves the memory of an accelerator."""

    kind = "transport"
    is_gpu: bool = False


@dataclass(frozen=True, kw_only=True)
class TransportProvider(AnyTransportProvider[O]):
    """`create` makes the engine half. `create_server(options, arena_fd)` makes the server half, None for an
    engine-driven transport; `arena_fd` is the arena's descriptor, borrowed until the half is closed."""

    create: Callable[[O, EngineLink], TransferContext]
    create_server: Callable[[O, int], ServerTransport] | None = None
