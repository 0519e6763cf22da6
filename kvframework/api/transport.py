"""Owns the transport contract: how bytes move between an engine's memory and the server's arena, both halves.

Engine-driven transports (CPU gather) copy in the engine process and need no server half. Server-driven ones (CUDA IPC)
send memory handles at registration; their server half copies.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from kvframework.api.futures import MessagingFuture
from kvframework.api.keys import CacheKey
from kvframework.api.layout import KVLayout, LayerTensors, Layout, MemoryLayoutDesc
from kvframework.api.types import BlockIds, Buffer, Message
from kvframework.errors import KVFrameworkError, TransportMismatch

if TYPE_CHECKING:
    import torch

    from kvframework.api.requests import ClientInfo


# Ranges that one plan may hold: a bound of what is decoded at all.
MAX_RANGES = 1 << 16


class ArenaRange(Message, frozen=True, array_like=True):
    """One object's place in the arena, in bytes; `chunk` counts from the key's `start`."""

    chunk: int
    group: int
    offset: int
    length: int


class StoreOutcome(Message, frozen=True):
    """What a STORE did with each object: counts over chunks x layer groups."""

    stored: int = 0
    present: int = 0
    in_flight: int = 0
    dropped: int = 0
    unknown: int = 0

    @property
    def ok(self) -> bool:
        """True if every object is or will be a hit: nothing was dropped, or written and its COMMIT not answered
        (`unknown`)."""
        return self.dropped == 0 and self.unknown == 0


class StorePlan(Message, frozen=True):
    """Answer to PREPARE_STORE: write `ranges`, then commit `lease`.

    `lease` is "" when there is nothing to write. The ranges belong to the caller until COMMIT, ABORT or its end; after
    `lease_s` seconds they are quarantined: still the caller's to write, but never published.
    """

    lease: str
    ranges: Annotated[tuple[ArenaRange, ...], Meta(max_length=MAX_RANGES)]
    outcome: StoreOutcome
    lease_s: float = 0.0


class RetrievePlan(Message, frozen=True):
    """Answer to PREPARE_RETRIEVE: read `ranges`, then commit `lease`. Empty and `hit` False when anything is missing.

    The ranges are pinned for `lease_s` seconds; COMMIT_RETRIEVE tells whether they were pinned throughout.
    """

    hit: bool
    lease: str = ""
    ranges: Annotated[tuple[ArenaRange, ...], Meta(max_length=MAX_RANGES)] = ()
    lease_s: float = 0.0
    reason: str = ""


class Registration(Message, frozen=True):
    """What the engine side knows of its own instance once the server accepted it."""

    instance_id: int
    rank: int
    namespace: bytes
    layout: KVLayout
    desc: MemoryLayoutDesc


# What a client can lose.
LostKind = Literal["lookups", "loads", "stores"]


class EngineLink(ABC):
    """What a transport's engine half may ask of the server.

    A call that returns a future waits for the answer a moment only (50 ms, and not again while the server is slow):
    most often the future is resolved. Else it resolves by the deadline of its kind, seconds later, and a transport
    should not hold up the engine's thread for that long. Futures fail with `KVFrameworkError` (`DeadlineExceeded`,
    `ServerGone`, a typed refusal).
    """

    @abstractmethod
    def arena(self) -> memoryview | None:
        """The server's arena, mapped writable in this process, or None if it cannot be (over TCP).

        Ask again for every request, and once more after the prepare: ranges belong to the arena only if it is the very
        same object then (the server may have been restarted in between). The mapping stands as long as somebody refers
        to the view or to a tensor made from it; never release it.
        """

    @abstractmethod
    def prepare_store(
        self, key: CacheKey, instance_id: int, first_chunks: Sequence[int] = ()
    ) -> MessagingFuture[StorePlan]:
        """`first_chunks`: per layer group, how many chunks of the range have no blocks any more and are not stored; ()
        if all have. Only a window or state may lack any."""

    @abstractmethod
    def commit_store(self, lease: str) -> MessagingFuture[StoreOutcome]:
        """Publishes the lease's ranges. What could not be published counts as dropped. After a `DeadlineExceeded` that
        is unknown: the server publishes them when it comes to it, and nothing stays reserved."""

    @abstractmethod
    def abort_store(self, lease: str) -> None:
        """Gives the lease's ranges back. Never raises."""

    @abstractmethod
    def prepare_retrieve(self, key: CacheKey, instance_id: int) -> MessagingFuture[RetrievePlan]: ...

    @abstractmethod
    def commit_retrieve(self, lease: str) -> MessagingFuture[bool]:
        """False if the pins did not hold throughout: what was read may be foreign bytes."""

    def lost(self, kind: LostKind, error: BaseException, nbytes: int = 0) -> None:
        """To be called for a store or load that failed for want of an answer, or by an error: the server's status shows
        it. `nbytes` is what it was to move. Never blocks. `submit` does it by itself."""
        del kind, error, nbytes

    # The wire path, where `arena()` is None: the same objects, as raw buffers. The bulk has a socket of its own.

    def missing_chunks(self, key: CacheKey, instance_id: int) -> MessagingFuture[list[int]]:
        """Which of the key's objects the server lacks, ascending. Objects count chunk by chunk from `key.start`, in
        each chunk by layer group."""
        raise TransportMismatch(f"{type(self).__name__} moves no bytes over the wire")

    def store_chunks(
        self, key: CacheKey, instance_id: int, objects: Sequence[int], buffers: Sequence[Buffer]
    ) -> MessagingFuture[StoreOutcome]:
        """Sends one buffer for each of `objects` (ascending); what is stored then is a hit. At most 256 MiB and 4096
        buffers a call. Does not wait for the answer, but may wait for a handshake at first.

        Nothing is copied: the buffers belong to the call until the future has a result. When it fails they still may be
        read, for as long as somebody refers to them: give them up, never write to them again.
        """
        raise TransportMismatch(f"{type(self).__name__} moves no bytes over the wire")

    def retrieve_chunks(self, plan: RetrievePlan, positions: Sequence[int]) -> MessagingFuture[Sequence[memoryview]]:
        """The bytes of `plan.ranges` at `positions`, a buffer each; an empty sequence if the pins have lapsed. Bounds
        and waiting as for `store_chunks`. The buffers are the caller's and hold what was sent, which is only known to
        be right once `commit_retrieve(plan.lease)` has said True."""
        raise TransportMismatch(f"{type(self).__name__} moves no bytes over the wire")

    @abstractmethod
    def gather_block(self, instance_id: int, blocks: Sequence[int], event: bytes) -> list[bytes]:
        """Has the server half of a server-driven transport gather one block per layer group, see
        `TransferContext.gather_block`. Waits for it, a few seconds at most."""

    @abstractmethod
    def submit(
        self, kind: str, key: CacheKey, instance_id: int, block_ids: BlockIds, event: bytes, skip_first_n_tokens: int
    ) -> MessagingFuture[bool]:
        """Server-driven STORE or RETRIEVE (`kind`); never waits. The future resolves once the server touches the
        blocks no more; `cancel()` on it sends CANCEL."""


class TransferContext(ABC):
    """The engine half of a transport, one per registered instance. Called from the engine's own thread.

    Returns futures and never polls or keeps them. Tensors are passed at each submit and are borrowed until the
    future is resolved.
    """

    def declared(self, layout: Layout, declared: KVLayout) -> None:
        """Told what the tensors are before their first `memory_handles`: for transports that lend them."""
        del layout, declared

    @abstractmethod
    def memory_handles(self, kv_caches: Mapping[str, LayerTensors]) -> tuple[bytes, ...]:
        """What the server half needs to reach the engine's memory; () for an engine-driven transport."""

    @abstractmethod
    def register(self, registration: Registration, layout: Layout) -> None:
        """Called after every successful registration, a reconnect's too."""

    @abstractmethod
    def submit_store(
        self,
        request_id: str,
        key: CacheKey,
        instance_id: int,
        kv_caches: Mapping[str, LayerTensors],
        block_ids: BlockIds,
        event: torch.Event | None,
        blocks_in_chunk: Sequence[int],
    ) -> MessagingFuture[bool]:
        """Stores the tokens `[key.start, key.end)` held in `block_ids` (one list per layer group).

        True: every object is stored, present, or being stored by another. `future.detail` is a `StoreOutcome`.
        `blocks_in_chunk` has one count per layer group. `NO_BLOCK` stands for blocks that a window or state has given
        away, see `touched_blocks`; every other block holds its tokens. Raises `BadBlockIds` before anything is
        reserved.
        """

    @abstractmethod
    def submit_retrieve(
        self,
        request_id: str,
        key: CacheKey,
        instance_id: int,
        kv_caches: Mapping[str, LayerTensors],
        block_ids: BlockIds,
        event: torch.Event | None,
        blocks_in_chunk: Sequence[int],
        skip_first_n_tokens: int = 0,
    ) -> MessagingFuture[bool]:
        """Loads the tokens `[key.start + skip_first_n_tokens, key.end)` into `block_ids`.

        `block_ids` cover all of `[key.start, key.end)`; slots of skipped tokens are not written, nor what a window or
        state does not reach, see `touched_blocks`. False: a miss or a
        lost pin; the blocks then hold anything and must be computed.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees what the context holds. Idempotent."""

    def gather_block(self, kv_caches: Mapping[str, LayerTensors], blocks: Sequence[int]) -> list[bytes]:
        """One block per layer group (`blocks`), through the path that stores take, as the bytes of its canonical form
        `[planes, layers, slots per block, hidden]`. Blocking; only for the canary at registration.

        Server-driven transports answer with `EngineLink.gather_block`, engine-driven ones gather by themselves.
        """
        raise TransportMismatch(
            f"{type(self).__name__} cannot gather a block for the canary", hint="implement gather_block"
        )


class CopyJob:
    """One server-driven STORE or RETRIEVE, made by the core, carried out by a transport's server half.

    `ranges` are in `arena`. `block_ids` are what objects are made of, `blocks_in_chunk` to an object (of a state one),
    checked against the registered number of blocks; a `NO_BLOCK` among them is not to be touched. `cancelled` is set
    once nobody wants the copy any more.
    """

    __slots__ = (
        "_on_cancel",
        "arena",
        "block_ids",
        "blocks_in_chunk",
        "cancelled",
        "event",
        "is_store",
        "ranges",
        "skip_tokens",
    )

    def __init__(
        self,
        *,
        is_store: bool,
        arena: memoryview,
        ranges: Sequence[ArenaRange],
        block_ids: BlockIds,
        blocks_in_chunk: Sequence[int],
        event: bytes,
        skip_tokens: int = 0,
    ) -> None:
        self.is_store = is_store
        self.arena = arena
        self.ranges = ranges
        self.block_ids = block_ids
        self.blocks_in_chunk = blocks_in_chunk
        self.event = event
        self.skip_tokens = skip_tokens
        self.cancelled = threading.Event()
        self._on_cancel: Callable[[], None] | None = None

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Has `callback` called in whatever thread cancels, at once if that was done, perhaps twice. It must not
        block."""
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
    def copy(self, job: CopyJob) -> MessagingFuture[bool]:
        """Starts the copy. The future resolves only once the job's blocks and ranges are touched no more, whether it
        succeeded (True), failed (False or an error) or saw `job.cancelled` (False)."""

    @abstractmethod
    def close(self) -> None:
        """Closes the mappings at once; copies in flight resolve first. Idempotent."""

    def opened(self) -> MessagingFuture[None] | None:
        """Resolved once the engine's memory is open, or failed with why it is not; None if it is open already."""
        return None

    def closed(self) -> MessagingFuture[None] | None:
        """After `close`: resolved once nothing of the engine's memory is mapped any more; None if that is so."""
        return None

    def failure(self) -> KVFrameworkError | None:
        """Why nothing can be copied any more: the instance must register again. None as long as all is well."""
        return None


class ServerTransport(ABC):
    """The server half of a server-driven transport, one per server."""

    @abstractmethod
    def open(self, layout: KVLayout, desc: MemoryLayoutDesc, handles: Sequence[bytes]) -> ServerContext:
        """Opens an instance's memory handles. Raises `RequestError` if they are malformed. Called from the serving
        thread; what takes time is told by `ServerContext.opened`."""

    def open_for(
        self, client: ClientInfo, layout: KVLayout, desc: MemoryLayoutDesc, handles: Sequence[bytes]
    ) -> ServerContext:
        """What the core calls: `open`, for transports that need not know whose memory it is."""
        del client
        return self.open(layout, desc, handles)

    def attach(self, arena_fd: int) -> None:
        """Told once, before anything is opened: the arena's descriptor, borrowed until `close`."""
        del arena_fd

    def status(self) -> dict[str, object]:
        """The transport's part of the status document, plain values of JSON. Called from any thread; must not block."""
        return {}

    @abstractmethod
    def close(self) -> None: ...
