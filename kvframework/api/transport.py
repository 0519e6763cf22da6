"""The transport contract, in an engine's process and in the server: how bytes move between an engine's memory and the
server's arena. Engine-driven transports (CPU gather) copy in the engine's process and need no server half.
Server-driven ones (CUDA IPC) send memory handles at registration; their server half, `ServerTransport`, copies.

First the data of one transfer, then the link to the server, then what a transport implements."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

from kvframework.api.futures import Future, StreamHook
from kvframework.api.keys import CacheKey, ChunkContent
from kvframework.api.layout import KVLayout, LayerTensors, Layout, MemoryLayoutDesc
from kvframework.api.plugin import BlockIds, Buffer, Diagnose, Message, O, Provider, hookimpl
from kvframework.api.requests import ClientInfo
from kvframework.errors import KVFrameworkError, TransportMismatch

__all__ = [
    "Arena",
    "ArenaRange",
    "BlockIds",
    "CopyJob",
    "EngineDrivenLink",
    "EngineLink",
    "GroupBlocks",
    "LoadGrant",
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


class Arena(NamedTuple):
    """The whole L1 arena as it is mapped in this process: `view` shows it, `address` is where it begins."""

    view: memoryview
    address: int


class ArenaRange(Message, frozen=True, array_like=True):
    """One object's place in the arena, in bytes; `chunk` counts from the key's `start`."""

    chunk: int
    group: int
    offset: int
    length: int


def error_code(error: BaseException) -> str:
    """Return the stable code of a framework's error, "error" for any other."""
    return error.code if isinstance(error, KVFrameworkError) else "error"


class StoreOutcome(Message, frozen=True):
    """The outcome of a STORE: objects by result, counted over chunks x layer groups. True in a condition if `ok`.
    `unknown` objects were written, and their COMMIT was not answered. `error` is the code of the error for which
    objects were dropped or are unknown, "" if there was none (a full L1 drops without one)."""

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
        """Return the sum of both; its error is the first of the two."""
        return StoreOutcome(
            self.stored + other.stored,
            self.present + other.present,
            self.in_flight + other.in_flight,
            self.dropped + other.dropped,
            self.unknown + other.unknown,
            self.error or other.error,
        )


class LoadOutcome(Message, frozen=True):
    """The outcome of a load: if `ok` the blocks hold the requested KV, else anything, and must be computed. True in a
    condition if `ok`. `reason` is the cause of a miss, in words, `error` the error's code, "" for a plain miss."""

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
    """The engine side's knowledge of its own instance once the server accepted it, at `since` of the monotonic clock.
    `rank` of `world_size` is in its keys. Where objects are shards of the whole model, `shards` is the number of those
    that the instance holds, else 0; `rank` is the first of them, `world_size` the number of all, and `layout` and
    `desc` have the engine's layer groups once for each shard."""

    instance_id: int
    rank: int
    namespace: bytes
    layout: KVLayout
    desc: MemoryLayoutDesc
    world_size: int = 1
    shards: int = 0
    since: float = 0.0


class LoadGrant(NamedTuple):
    """A lookup's permission for one instance to load the tokens `[start, end)`. An engine's scheduler passes it to the
    worker, whose link reads it. `content` names the prompt up to `end` and its salt, `boot_id` the server's start. The
    rest is the server's; times are of the node's monotonic clock."""

    instance_id: int
    lease: str
    start: int
    end: int
    content: bytes
    offsets: bytes
    objects: bytes
    boot_id: bytes
    began: float
    until: float


class GroupBlocks(NamedTuple):
    """The blocks of one layer group of a transfer. `ids` are those of the objects, object by object, `per_object` to
    each: all blocks of a chunk, of a state only the last one. Every id but `NO_BLOCK` is a block of the engine,
    `highest` at most (-1: none is touched). The first `first` ids are `NO_BLOCK`: a store leaves these objects out, a
    load does not write these blocks."""

    ids: Sequence[int]
    per_object: int
    first: int
    highest: int


@dataclass(frozen=True, eq=False)
class Transfer:
    """One STORE or load of whole chunks, checked by the core. The transport holds `kv_caches` against the declaration
    (`BadLayout`), and `GroupBlocks.highest` against them if that leaves the number of blocks open (`BadBlockIds`).

    `key` names the tokens `[key.start, key.end)`, `blocks` the engine's blocks that hold them, a `GroupBlocks` per
    layer group; `block_ids` are the ids as passed by the engine, one list per layer group for all tokens. `kv_caches`
    are the engine's tensors, borrowed until the transfer's future is resolved. `event` is the engine's event after
    which the copy may begin; for None, a transport that copies later records an event in the calling thread's current
    stream. Any other object makes the transfer a miss. `content` is sent with the bytes if the server wants it. With
    `grant` the link need not ask the server for ranges. `in_pieces`: a transport that copies a load in the engine's own
    thread does so in `Future.advance` only, piece by piece; others take no notice."""

    key: CacheKey
    registration: Registration
    kv_caches: Mapping[str, LayerTensors]
    block_ids: BlockIds
    blocks: Sequence[GroupBlocks]
    event: object | None = None
    content: ChunkContent | None = None
    grant: LoadGrant | None = None
    in_pieces: bool = False

    @property
    def request_id(self) -> str:
        """The engine's request id."""
        return self.key.request_id

    @property
    def tokens(self) -> int:
        """Tokens of the range."""
        return self.key.end - self.key.start

    @property
    def chunks(self) -> int:
        """Whole chunks of the range."""
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
        return tuple(each.first // each.per_object for each in self.blocks)

    def blocks_of(self, place: ArenaRange) -> Sequence[int]:
        """Return the block ids of one object, in its order."""
        blocks = self.blocks[place.group]
        return blocks.ids[place.chunk * blocks.per_object : (place.chunk + 1) * blocks.per_object]

    def failed(self, error: BaseException) -> StoreOutcome:
        """Return the outcome of a store that stored nothing, as `LoadOutcome.failed` is that of a load."""
        return StoreOutcome(dropped=self.objects, error=error_code(error))


R = TypeVar("R", bound=Message)
P = TypeVar("P")


class _Plan(Generic[R]):
    """The base of both plans. A plan is open until the first `commit` or `abort`; `with plan:` aborts at its end."""

    def __init__(
        self,
        arena: memoryview,
        ranges: Sequence[ArenaRange],
        commit: Callable[[], Future[R]],
        abort: Callable[[], object],
    ) -> None:
        self.arena = arena
        self.ranges = ranges
        self._commit = commit
        self._abort = abort
        self._is_open = bool(ranges)

    def __enter__(self: P) -> P:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.abort()

    def abort(self) -> None:
        """Give ranges and pins back, unless they were committed. Idempotent; never blocks, never raises."""
        if self._is_open:
            self._is_open = False
            self._abort()

    def _end(self, closed: R) -> Future[R]:
        """Commit; the future of a plan that is closed has the outcome `closed`."""
        if not self._is_open:
            return Future.resolved(closed)
        self._is_open = False
        return self._commit()


class StorePlan(_Plan[StoreOutcome]):
    """The answer to a prepared store: the caller writes each of `ranges` in `arena`, then calls `commit`; `with plan:`
    aborts at its end otherwise. The ranges are objects of the transfer that the engine holds, and the caller's until
    then; after their lease they are quarantined: the caller may still write them, but they are never published.
    `outcome` is that of the other objects. `arena` stays valid as long as there is a reference to it or to a tensor
    made from it: never release it."""

    def __init__(
        self,
        arena: memoryview,
        ranges: Sequence[ArenaRange],
        outcome: StoreOutcome,
        *,
        commit: Callable[[], Future[StoreOutcome]],
        abort: Callable[[], object],
    ) -> None:
        super().__init__(arena, ranges, commit, abort)
        self.outcome = outcome

    def commit(self) -> Future[StoreOutcome]:
        """Publish the ranges. The future has the outcome of all objects of the transfer and never fails: ranges that
        were not published count as dropped, and after a `DeadlineExceeded` as unknown (the server publishes them when
        it handles the request, and nothing stays reserved)."""
        return self._end(self.outcome + StoreOutcome(dropped=len(self.ranges)))


class LoadPlan(_Plan[LoadOutcome]):
    """The answer to a prepared load: the caller reads each of `ranges` in `arena`, which are pinned for a while, then
    calls `commit`, which says whether they stayed pinned throughout; `with plan:` else gives the pins back. No ranges
    if `hit` is False. `arena` is as in a `StorePlan`, empty where it is not mapped, see `receive`."""

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
        super().__init__(arena, ranges, commit, abort)
        self.hit = bool(ranges)
        self.reason = reason
        self._receive = receive

    def receive(self, positions: Sequence[int]) -> Future[Sequence[memoryview]]:
        """Return the bytes of `ranges` at `positions` over the wire, a buffer each, which the caller owns; an empty
        sequence if the pins have lapsed. Bounds and waiting as for `EngineDrivenLink.store_chunks`."""
        return self._receive(positions)

    def commit(self) -> Future[LoadOutcome]:
        """End the pins. The future never fails: it has a miss if the pins did not last throughout, since the bytes
        read may be foreign, or if the server did not answer."""
        return self._end(LoadOutcome(False, self.reason))


LostKind = Literal["lookups", "loads", "stores"]


class EngineDrivenLink(ABC):
    """The server as an engine-driven transport sees it. Thread-safe: `commit` and `abort` of a plan, too.

    A call that returns a future waits for the answer only briefly (50 ms, and not again while the server is slow), so
    most often the future is resolved. Otherwise it resolves by the call's deadline, seconds later: a transport must not
    block the engine's thread until then, and must not discard the answer, but continue in a callback of the future.
    Callbacks run in the calling thread if the answer is there, else in the connection's, which must not be held up:
    there a transport starts a copy, or hands it to a thread. Futures fail with `KVFrameworkError` (`DeadlineExceeded`,
    `ServerGone`, a typed refusal) unless documented otherwise. `cancel` on the future of a `prepare` gives back what
    the answer may still reserve."""

    @property
    @abstractmethod
    def maps_arena(self) -> bool:
        """Whether the server's arena is mapped in this process now; it cannot be over TCP."""

    def map_ahead(self) -> None:
        """For a transport that copies to and from the arena in this process: has its resident pages mapped here, in the
        background; ask at each registration. Never blocks, does nothing where the arena is not mapped."""
        return

    @abstractmethod
    def prepare_store(self, transfer: Transfer) -> Future[StorePlan]:
        """Reserve ranges for the objects that the server lacks. Fails with `ServerGone` without a mapped arena."""

    @abstractmethod
    def prepare_load(self, transfer: Transfer) -> Future[LoadPlan]:
        """Pin all objects that the load needs; a plan without ranges is a miss."""

    # The wire path, where the arena is not mapped: the same objects, as raw buffers. The bulk has a separate socket.

    def missing_chunks(self, transfer: Transfer) -> Future[list[int]]:
        """Return which of the transfer's objects the server lacks, ascending. Objects count chunk by chunk from
        `key.start`, and within a chunk by layer group."""
        raise TransportMismatch(f"{type(self).__name__} does not transfer bytes over the wire")

    def store_chunks(
        self, transfer: Transfer, objects: Sequence[int], buffers: Sequence[Buffer]
    ) -> Future[StoreOutcome]:
        """Send one buffer for each of `objects` (ascending); a stored object is a hit from then on. At most 256 MiB and
        4096 buffers a call. Waits for no answer, perhaps for a handshake. Nothing is copied: the buffers belong to the
        call until the future has a result. After a failure they may still be read: drop them unchanged."""
        raise TransportMismatch(f"{type(self).__name__} does not transfer bytes over the wire")


class ServerDrivenLink(ABC):
    """The server as the engine half of a server-driven transport sees it. Thread-safe. The futures of transfers resolve
    once the server no longer touches the blocks and never fail; `cancel` sends CANCEL. `event` is the transport's own
    handle of an event that the server half waits for; `stream_hook` blocks a stream of the engine until the future is
    resolved, see `EngineDriver.block_stream`."""

    @abstractmethod
    def store(
        self, transfer: Transfer, *, event: bytes = b"", stream_hook: StreamHook | None = None
    ) -> Future[StoreOutcome]:
        """Send STORE; never waits. Raises `BadBlockIds` for ids that cannot be sent."""

    @abstractmethod
    def load(
        self, transfer: Transfer, skip_tokens: int, *, event: bytes = b"", stream_hook: StreamHook | None = None
    ) -> Future[LoadOutcome]:
        """Send RETRIEVE; never waits. Raises as `store` does."""

    @abstractmethod
    def gather_block(self, registration: Registration, blocks: Sequence[int], event: bytes) -> list[bytes]:
        """Return a block per layer group from the server half, as `TransferContext.gather_block`. Blocks."""


class EngineLink(EngineDrivenLink, ServerDrivenLink):
    """The link that `TransportProvider.create` gets: both kinds, of which a transport uses one."""


class TransferContext(ABC):
    """The engine half of a transport, one per registered instance. Called from the engine's own thread. Returns futures
    and never polls or keeps them. An error of `store` or `load` is a miss that the core logs and counts; only
    `BadLayout` and `BadBlockIds`, for tensors and blocks that differ from the registered ones, reach the engine. The
    future of a transfer never fails: its outcome is then `Transfer.failed(error)` or `LoadOutcome.failed(error)`. Its
    `cancel` makes the transfer a miss: at once while it waits for server or event, else when the copy has ended, which
    still touches the blocks. If the server dies, the same applies, and the arena stays mapped as long as the plan."""

    def on_layout(self, layout: Layout, declared: KVLayout) -> None:
        """Receive the declaration of the tensors before each `memory_handles`: for transports that export them."""
        del layout, declared

    def memory_handles(self, kv_caches: Mapping[str, LayerTensors]) -> tuple[bytes, ...]:
        """Return handles of the engine's memory for the server half, at most 4096 bytes each; () if engine-driven."""
        del kv_caches
        return ()

    def on_arena(self, arena: Arena | None) -> None:
        """Receive the mapped arena, at each registration with a new arena, for devices that must register host memory
        (`cudaHostRegister`, `clEnqueueSVMMap`, Level Zero's import). None, at the end of the session or before `close`:
        unregister it once no copy runs, and drop all references; until then it stays mapped, and the server counts this
        process as alive. Do long work in a thread. Raises `DeviceError`."""
        return

    def on_registered(self, registration: Registration, layout: Layout) -> None:
        """Called after every registration, a reconnect's too. Raises `BadLayout` or `TransportMismatch` if it cannot
        move these tensors: the core undoes the registration, and `auto` tries the next transport."""
        del registration, layout

    @abstractmethod
    def store(self, transfer: Transfer) -> Future[StoreOutcome]:
        """Store the transfer's tokens. The future is resolved once the blocks are no longer read."""

    @abstractmethod
    def load(self, transfer: Transfer, skip_tokens: int) -> Future[LoadOutcome]:
        """Load the transfer's tokens except the first `skip_tokens`, fewer than there are, whose slots are not written.
        Opaque blocks are skipped whole; a state is always written. The future is resolved once the blocks are no longer
        touched. A transport that copies in this thread should do so in `Future.advance` if the load is `in_pieces`: the
        engine then waits for one piece at most."""

    @abstractmethod
    def close(self) -> None:
        """Cancel what waits, wait for copies that have begun, and free the context's resources. Idempotent."""

    def gather_block(self, kv_caches: Mapping[str, LayerTensors], blocks: Sequence[int]) -> list[bytes]:
        """Return one block per layer group (`blocks`), through the path that stores take, as the bytes of its
        canonical form `[planes, layers, slots per block, hidden]`; server-driven transports by
        `ServerDrivenLink.gather_block`. Blocking; only for the canary at registration."""
        raise TransportMismatch(
            f"{type(self).__name__} cannot gather a block for the canary", hint="implement gather_block"
        )


@dataclass(frozen=True, kw_only=True)
class TransportProvider(Provider[O]):
    """A transport. `create` makes the engine half. `create_server(options, arena_fd)` makes the server half, None for
    an engine-driven transport; `arena_fd` is the arena's descriptor, borrowed until the half is closed. `is_gpu`: it
    moves the memory of an accelerator, as the status says of its instances; the doctor looks at the limit of locked
    memory. `diagnose` as for `TierProvider`, of devices and their driver."""

    kind = "transport"

    create: Callable[[O, EngineLink], TransferContext]
    create_server: Callable[[O, int], ServerTransport] | None = None
    is_gpu: bool = False
    diagnose: Diagnose[O] | None = None


@dataclass(eq=False, kw_only=True, slots=True)
class CopyJob:
    """One server-driven STORE or RETRIEVE, made and checked by the core, done by a transport's server half. `ranges`
    are in `arena`. `blocks` are by layer group, below the registered number of blocks; a `NO_BLOCK` among their ids
    must not be touched. `event` is the handle that the engine half sent. `cancelled`: the copy is no longer wanted."""

    is_store: bool
    arena: memoryview
    ranges: Sequence[ArenaRange]
    blocks: Sequence[GroupBlocks]
    event: bytes
    skip_tokens: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event, init=False)
    _on_cancel: Callable[[], None] | None = field(default=None, init=False)

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Register a cancel callback, which must not block. It runs in the cancelling thread or at once, or twice."""
        self._on_cancel = callback
        if self.cancelled.is_set():
            self.cancel()

    def cancel(self) -> None:
        """Ask the transport to stop; the copy's future resolves as always."""
        self.cancelled.set()
        callback, self._on_cancel = self._on_cancel, None
        if callback is not None:
            callback()


class ServerContext(ABC):
    """The server half of one instance: the engine's memory, opened. Called from the serving thread; must not block."""

    @abstractmethod
    def copy(self, job: CopyJob) -> Future[bool]:
        """Start the copy. The future resolves only once the job's blocks and ranges are no longer touched, whether it
        succeeded (True), failed (False or an error) or saw `job.cancelled` (False)."""

    @abstractmethod
    def close(self) -> None:
        """Close the mappings at once; copies in flight resolve first. Idempotent."""

    def when_open(self) -> Future[None] | None:
        """Return a future that resolves once the engine's memory is open, or fails with the reason; None if it is."""
        return None

    def when_closed(self) -> Future[None] | None:
        """Return, after `close`, a future that resolves once none of the engine's memory is mapped; None if none is."""
        return None

    def failure(self) -> KVFrameworkError | None:
        """Return the error that makes all copies impossible, so that the instance must register again, or None."""
        return None


class ServerTransport(ABC):
    """The server half of a server-driven transport, one per server."""

    @abstractmethod
    def open(
        self, client: ClientInfo, layout: KVLayout, desc: MemoryLayoutDesc, handles: Sequence[bytes]
    ) -> ServerContext:
        """Open the memory handles of one of `client`'s instances. Raises `RequestError` if they are malformed. Called
        from the serving thread; slow work continues behind `ServerContext.when_open`."""

    def status(self) -> dict[str, object]:
        """Return the transport's part of the status document, plain values of JSON. Under `counters`, its own:
        what `kvframework.api.counter.Counts.status` returns. Called from any thread; must not block."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Free all resources. Called once, after the last instance has been closed."""
