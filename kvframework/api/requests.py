"""Owns how requests are declared, by the core and by plugins, and what a plugin's handlers may ask of the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, Union

from kvframework.api.futures import MessagingFuture
from kvframework.api.keys import CacheKey, PackedKey
from kvframework.api.layout import MemoryLayoutDesc
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

    def hold(self) -> int | None:
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


HandlerResult = Union[Message, Reply, "MessagingFuture[Message]"]
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
    def cancel(self) -> None:
        """Ends the load early; what has arrived stays."""


class EngineServices(ABC):
    """What handlers of plugins may ask of the engine. Thread-safe; nothing here blocks on L2."""

    chunk_size: int

    @abstractmethod
    def resolve_keys(self, key: CacheKey) -> Mapping[tuple[int, int], Sequence[PackedKey]]:
        """Object keys of the chunks in `[key.start, key.end)`, by (rank, layer group). Raises `RequestError`."""

    @abstractmethod
    def layout_desc(self, namespace: bytes) -> MemoryLayoutDesc | None:
        """The desc of a registered namespace, None if unknown here."""

    @abstractmethod
    def submit_prefetch_task(self, keys: Sequence[PackedKey], layout_desc: MemoryLayoutDesc) -> PrefetchTask | None:
        """Asks L2 for what L1 lacks of `keys` and loads it into L1, in the background.

        None if there is no L2 tier or too much is under way.
        """
