"""Owns how requests are declared, by the core and by plugins, and what a plugin's handlers may ask of the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, Union

from kvframework.api.futures import Future
from kvframework.api.hasher import KeyHasher
from kvframework.api.keys import CacheKey, PackedKey
from kvframework.api.layout import KVLayout, MemoryLayoutDesc
from kvframework.api.types import Buffer, Message


@dataclass(frozen=True)
class RequestSpec:
    """One line of a request table.

    `name` travels in the type frame: ASCII, at most 64 bytes; a plugin's requests are named `plugin.NAME`. `deadline_s`
    is the longest that the server lets the caller wait. `buffers` is the most raw frames that may follow the payload.
    """

    name: str
    payload: type[Message]
    response: type[Message]
    deadline_s: float = 5.0
    buffers: int = 0


class ClientInfo(ABC):
    """The client session that sent a request."""

    session_id: int
    pid: int
    name: str
    local: bool

    def liveness_fd(self) -> int | None:
        """A descriptor, the caller's own, by which the client takes the server for alive as long as it is open; None
        for a client that is not local. For the server's processes that touch the client's memory: they may outlive it.
        """
        return None


@dataclass(frozen=True)
class Reply:
    """A response with raw buffer frames behind it. The buffers are sent without a copy and must stay unchanged until
    then."""

    payload: Message
    buffers: Sequence[Buffer] = ()


HandlerResult = Union[Message, Reply, "Future[Message]"]
P = TypeVar("P", bound=Message)


@dataclass(frozen=True)
class Handler(Generic[P]):
    """Binds a function to a request: `call(client, payload, buffers)`.

    Inline handlers run on the serving thread and must not block; `pooled` ones run in a worker thread. `ordered`
    ones of one client run one after the other in the order of arrival. A handler may return a future: the response
    follows when it resolves. It may raise `KVFrameworkError` for a typed error frame.
    """

    spec: RequestSpec
    call: Callable[[ClientInfo, P, Sequence[memoryview]], HandlerResult]
    pooled: bool = False
    ordered: bool = False


class PrefetchTask(ABC):
    """A load from L2 into L1 under way."""

    done: bool
    loaded: int

    @abstractmethod
    def add_done_callback(self, call: Callable[[], object]) -> None:
        """Calls `call` once the load has ended, also after a failure or a cancel: in a storage thread, while all that
        the load chose and could get is still pinned; at once, with nothing pinned, if it had ended before. It must not
        block; what it raises is logged."""

    @abstractmethod
    def cancel(self) -> None:
        """Ends the load early; what has arrived stays."""


# Which of the keys are worth having, by index, given which of them could be had.
Select = Callable[[Sequence[bool]], Sequence[int]]


class InstanceContext(ABC):
    """What the server knows of one registered instance. Lives until the instance is unregistered or its client ends.

    `rank` is None for a registration that did not tell it. `attached` holds what handlers keep of the instance, each
    under its plugin's name: it ends with the instance, and belongs to the serving thread (handlers that are not
    pooled) as far as it is changed.
    """

    instance_id: int
    session_id: int
    model_name: str
    world_size: int
    rank: int | None
    namespace: bytes
    layout: KVLayout
    attached: dict[str, object]

    @abstractmethod
    def get_layout_desc(self, chunk_size: int) -> MemoryLayoutDesc:
        """Shape and dtype of one object per layer group, for a configured chunk size in tokens."""


class CacheServices(ABC):
    """What handlers of plugins may ask of the engine. Thread-safe; nothing here blocks on L2. `hasher` is the one whose
    digests engines and server share."""

    chunk_size: int
    hasher: KeyHasher

    @abstractmethod
    def instance(self, instance_id: int, client: ClientInfo | None = None) -> InstanceContext:
        """A registered instance; with `client` only one of its own. Raises `NotRegistered`."""

    @abstractmethod
    def resolve_keys(self, key: CacheKey) -> Mapping[tuple[int, int], Sequence[PackedKey]]:
        """Object keys of the chunks in `[key.start, key.end)`, by (rank, layer group). Raises `RequestError`."""

    @abstractmethod
    def key_prefixes(self, namespace: bytes, cache_salt: str, ranks: Sequence[int]) -> Sequence[bytes]:
        """What the object keys of chunks begin with, rank by rank and in each by layer group: append a chunk's digest.
        For names of your own; `resolve_keys` gives those of a request. Raises `RequestError` for a namespace that is
        not registered."""

    @abstractmethod
    def layout_desc(self, namespace: bytes) -> MemoryLayoutDesc | None:
        """The desc of a registered namespace, None if unknown here."""

    @abstractmethod
    def present(self, keys: Sequence[PackedKey]) -> Sequence[bool]:
        """Which of `keys` L1 has now. Unless they are pinned they may leave at any time."""

    @abstractmethod
    def pin(self, client: ClientInfo, keys: Sequence[PackedKey], request_id: str = "") -> str:
        """Pins all of `keys` in L1 under a ticket of `client`, which ends as one of a LOOKUP does: by
        FREE_LOOKUP_LOCKS, CANCEL, END_SESSION of its request, its time, or the client's end.

        "" if one of them is not there, or the client has gone. Raises `RequestError` if it holds too many tickets.
        """

    @abstractmethod
    def submit_prefetch_task(
        self, keys: Sequence[PackedKey], layout_desc: MemoryLayoutDesc, *, select: Select | None = None
    ) -> PrefetchTask | None:
        """Asks L2 for what L1 lacks of `keys` and loads it into L1, in the background.

        `select` picks what is worth loading, once the tiers have said what they hold, and again after a loss (default:
        all); it runs in a storage thread. None if there is no L2 tier or too much is under way.
        """
