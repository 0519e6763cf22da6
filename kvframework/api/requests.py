"""Declarations of requests, of the core and of plugins, and the services that the cache offers to plugins' handlers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, Union

from kvframework.api.futures import Future
from kvframework.api.hasher import KeyHasher
from kvframework.api.keys import CacheKey, PackedKey
from kvframework.api.layout import KVLayout, MemoryLayoutDesc
from kvframework.api.plugin import Buffer, Message, O, Provider, hookimpl

__all__ = [
    "Buffer",
    "CacheKey",
    "CacheServices",
    "ClientInfo",
    "Handler",
    "HandlerResult",
    "InstanceContext",
    "Message",
    "PackedKey",
    "PrefetchTask",
    "Reply",
    "RequestSpec",
    "RequestsProvider",
    "Select",
    "hookimpl",
]


@dataclass(frozen=True)
class RequestSpec:
    """One line of a request table. `name` travels in the type frame: ASCII, at most 64 bytes; a plugin's requests are
    named `plugin.NAME`. `deadline_s` is the server's, for the answer; `buffers` bounds raw frames behind it."""

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
        """Return a descriptor, owned by the caller: the client takes the server for alive as long as it is open. None
        for a client that is not local. For processes that touch the client's memory, and may outlive the server."""
        return None


@dataclass(frozen=True)
class Reply:
    """A response, followed by raw buffer frames. These are sent without a copy: they must not change before."""

    payload: Message
    buffers: Sequence[Buffer] = ()


HandlerResult = Union[Message, Reply, "Future[Message]"]
P = TypeVar("P", bound=Message)


@dataclass(frozen=True)
class Handler(Generic[P]):
    """Binds a function to a request: `call(client, payload, buffers)`. It runs on the serving thread and must not
    block, or `pooled` in a worker thread. `ordered` ones of one client run one after the other in the order of arrival.
    A future that it returns is answered when it resolves. It may raise `KVFrameworkError` for a typed error frame."""

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
        """Call `call` once the load has ended, also after a failure or a cancel: in a storage thread, while the loaded
        objects are still pinned; immediately, with nothing pinned, if the load has already ended. `call` must not
        block; its exceptions are logged."""

    @abstractmethod
    def cancel(self) -> None:
        """End the load early; objects that have arrived stay in L1. Does not block."""


Select = Callable[[Sequence[bool]], Sequence[int]]


class InstanceContext(ABC):
    """One registered instance, as the server knows it, until the instance is unregistered or its client ends.
    `attached` holds the handlers' state of the instance, each under its plugin's name: it ends with the instance, and
    only the serving thread (handlers that are not pooled) may change it."""

    instance_id: int
    session_id: int
    model_name: str
    world_size: int
    namespace: bytes
    layout: KVLayout
    attached: dict[str, object]

    @property
    @abstractmethod
    def ranks(self) -> Sequence[int]:
        """The ranks whose objects it may store and load: its own; all after a registration by the eight fields."""

    @abstractmethod
    def get_layout_desc(self, chunk_size: int) -> MemoryLayoutDesc:
        """Return shape and dtype of one object per layer group, for a configured chunk size in tokens."""


class CacheServices(ABC):
    """The services of the cache for plugins' handlers. Thread-safe; no call waits for L2. `hasher` makes the digests
    that engines and server share."""

    chunk_size: int
    hasher: KeyHasher

    @abstractmethod
    def instance(self, instance_id: int, client: ClientInfo | None = None) -> InstanceContext:
        """Return a registered instance; with `client`, only an instance of that client. Raises `NotRegistered`."""

    @abstractmethod
    def resolve_keys(self, key: CacheKey) -> Mapping[tuple[int, int], Sequence[PackedKey]]:
        """Return the object keys of `[key.start, key.end)`, by (rank, layer group). Raises `RequestError`."""

    @abstractmethod
    def key_prefixes(self, namespace: bytes, cache_salt: str, ranks: Sequence[int]) -> Sequence[bytes]:
        """Return the prefixes of object keys, rank by rank and then by layer group: append a chunk's digest. For a
        plugin's own names; `resolve_keys` gives those of a request. Raises `RequestError` for an unknown namespace."""

    @abstractmethod
    def layout_desc(self, namespace: bytes) -> MemoryLayoutDesc | None:
        """Return the desc of a registered namespace, None if the namespace is not registered."""

    @abstractmethod
    def present(self, keys: Sequence[PackedKey]) -> Sequence[bool]:
        """Return which of `keys` are in L1 now. Objects that are not pinned may leave at any time."""

    @abstractmethod
    def pin(self, client: ClientInfo, keys: Sequence[PackedKey], request_id: str = "") -> str:
        """Pin all of `keys` in L1 under a ticket of `client`, which ends as one of a LOOKUP does: by
        FREE_LOOKUP_LOCKS, CANCEL, END_SESSION of its request, its time, or the client's end. Returns "" if a key is not
        in L1, or the client has ended. Raises `RequestError` if the client has too many tickets."""

    @abstractmethod
    def submit_prefetch_task(
        self, keys: Sequence[PackedKey], layout_desc: MemoryLayoutDesc, *, select: Select | None = None
    ) -> PrefetchTask | None:
        """Load those of `keys` that L1 lacks from L2, in the background. `select` picks the keys worth it once the
        tiers have answered (default: all); it runs in a storage thread. A key that no tier returns after all ends the
        load. Returns None if there is no L2 tier or too many loads are running."""


@dataclass(frozen=True, kw_only=True)
class RequestsProvider(Provider[O]):
    """A plugin's own requests; their names start with `name` and a dot."""

    kind = "requests"
    create: Callable[[O, CacheServices], Sequence[Handler]]  # type: ignore[type-arg]
