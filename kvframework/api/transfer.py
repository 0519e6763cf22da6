"""The data of one transfer: the blocks that an engine stores or loads, their places in the arena, and the outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from kvframework.api.futures import Future
from kvframework.api.keys import CacheKey
from kvframework.api.layout import KVLayout, LayerTensors, MemoryLayoutDesc
from kvframework.api.plugin import BlockIds, Message
from kvframework.errors import KVFrameworkError

if TYPE_CHECKING:
    from types import TracebackType

    import torch

__all__ = [
    "HASH_BYTES",
    "ArenaRange",
    "ChunkContent",
    "Extra",
    "GroupBlocks",
    "Image",
    "LoadGrant",
    "LoadOutcome",
    "LoadPlan",
    "Registration",
    "StoreOutcome",
    "StorePlan",
    "Transfer",
    "error_code",
]


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
    """The engine side's knowledge of its own instance once the server accepted it.

    `rank` of `world_size` is in its keys. Where objects are shards of the whole model, `shards` is the number of those
    that the instance holds, else 0. `rank` is then the first of them, `world_size` the number of all, and a transport
    gets a `layout` and a `desc` with the engine's layer groups once for each shard. `since` is the time of the
    monotonic clock, in seconds, at which the server had accepted it.
    """

    instance_id: int
    rank: int
    namespace: bytes
    layout: KVLayout
    desc: MemoryLayoutDesc
    world_size: int = 1
    shards: int = 0
    since: float = 0.0


class LoadGrant(NamedTuple):
    """What a lookup has prepared for the load of tokens `[start, end)` by one instance: it goes from the scheduler's
    side of an engine to the worker's, and there to the link, which reads it. `content` names the prompt up to `end` and
    its salt, `boot_id` the server's start. The rest is the server's, and times of the node's monotonic clock, in
    seconds."""

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
    """The blocks of one layer group of a transfer.

    `ids` are the blocks of the objects, object by object, `per_object` to each: all blocks of a chunk, of a state only
    the last one. Every id but `NO_BLOCK` is a block of the engine, `highest` at most (-1: none is touched). The first
    `first` ids are `NO_BLOCK`: a store leaves these objects out, a load does not write these blocks.
    """

    ids: Sequence[int]
    per_object: int
    first: int
    highest: int


@dataclass(frozen=True, eq=False)
class Transfer:
    """One STORE or load of whole chunks, checked by the core: nothing of it needs another check.

    `key` names the tokens `[key.start, key.end)`, `blocks` the engine's blocks that hold them, a `GroupBlocks` per
    layer group; `block_ids` are the ids as passed by the engine, one list per layer group for all tokens. `kv_caches`
    are the engine's tensors, borrowed until the transfer's future is resolved. `event` is the engine's own event behind
    the work that the copy has to wait for, None for the work in the calling thread's current stream. `content` goes to
    the server beside the bytes, if it has asked for it. `grant` is for the link, which need not ask for ranges then.
    `in_pieces`: a transport that copies a load in the engine's own thread does so in `Future.advance` only, piece by
    piece; others take no notice.
    """

    key: CacheKey
    registration: Registration
    kv_caches: Mapping[str, LayerTensors]
    block_ids: BlockIds
    blocks: Sequence[GroupBlocks]
    event: torch.Event | None = None
    content: ChunkContent | None = None
    grant: LoadGrant | None = None
    in_pieces: bool = False

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
        return tuple(each.first // each.per_object for each in self.blocks)

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
        it handles the request, and nothing stays reserved). Ranges that were given back before are dropped."""
        if not self._is_open:
            return Future.resolved(self.outcome + StoreOutcome(dropped=len(self.ranges)))
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


# A block hash of an engine: u64.
HASH_BYTES = 8
MAX_EXTRA_BYTES = 1 << 16
MAX_TEXT = 1024
MAX_EXTRAS = 1 << 15

Name = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class Extra(Message, frozen=True, array_like=True):
    """The bytes that the hasher folds into a chunk; `chunk` counts from the first token of the content."""

    chunk: int
    content: Annotated[bytes, msgspec.Meta(max_length=MAX_EXTRA_BYTES)]


class Image(Message, frozen=True, array_like=True):
    """An image, or a similar input, in the place of `length` tokens; `offset` counts from the first token of the
    content and is negative for one that begins before."""

    identifier: Name
    offset: int
    length: int


class ChunkContent(Message, frozen=True):
    """The content of the tokens `[start, end)` of a cache key.

    `tokens` are packed u32 ids, `(end - start) * 4` bytes. `extras` are those of its chunks. `hashes` are the engine's
    own block hashes, packed u64, one for each `block_size` tokens; b"" and 0 if it has none. `images` and `lora_name`
    say to routers what the extras mean: a chunk with an extra and without either is not announced.
    """

    tokens: bytes
    extras: Annotated[tuple[Extra, ...], msgspec.Meta(max_length=MAX_EXTRAS)] = ()
    block_size: int = 0
    hashes: bytes = b""
    images: Annotated[tuple[Image, ...], msgspec.Meta(max_length=MAX_EXTRAS)] = ()
    lora_name: Name = ""

    def problem(self, tokens: int, chunk_tokens: int) -> str:
        """Returns what is wrong with it as the content of `tokens` tokens, "" for nothing."""
        if len(self.tokens) != tokens * 4:
            return f"token ids of {len(self.tokens)} bytes for {tokens} tokens"
        if self.block_size < 0 or bool(self.block_size) != bool(self.hashes):
            return f"block size {self.block_size} with {len(self.hashes)} bytes of hashes"
        if self.block_size and len(self.hashes) * self.block_size != tokens * HASH_BYTES:
            return f"{len(self.hashes)} bytes of hashes of {self.block_size} tokens each for {tokens} tokens"
        if any(not 0 <= each.chunk < tokens // chunk_tokens for each in self.extras):
            return f"an extra of a chunk outside of {tokens} tokens"
        return ""
