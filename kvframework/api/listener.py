"""The `Listener` contract: what a server's requests did, as records. The server makes each record once and puts it into
one bounded ring, which each listener reads in a separate thread. Where the ring is full the oldest records are
dropped, and a listener that has not read them learns how many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from kvframework.api.hasher import KeyHasher
from kvframework.api.keys import CacheKey, ChunkContent, PackedKey
from kvframework.api.plugin import Message, O, Provider, ServerTerms, hookimpl

if TYPE_CHECKING:
    import zmq

__all__ = [
    "Accessed",
    "Added",
    "Batch",
    "CacheKey",
    "ChunkShape",
    "Contents",
    "Finished",
    "Listener",
    "ListenerContext",
    "ListenerProvider",
    "PackedKey",
    "Record",
    "Records",
    "Registered",
    "Removed",
    "RequestRecord",
    "ServerTerms",
    "Sockets",
    "TierCall",
    "hookimpl",
]


class Added(msgspec.Struct, frozen=True, gc=False):
    """Objects are in L1 now."""

    keys: Sequence[PackedKey]


class Removed(msgspec.Struct, frozen=True, gc=False):
    """Objects have left L1."""

    keys: Sequence[PackedKey]


class Accessed(msgspec.Struct, frozen=True, gc=False):
    """A tier was asked for objects, or given some: `found` says whether it has each of them, a single value for all.
    `tier` is its number in the configuration, from 1."""

    tier: int
    keys: Sequence[PackedKey]
    found: Sequence[bool] | bool


class Registered(msgspec.Struct, frozen=True, gc=False):
    """The tokens of a key whose objects were stored or loaded. `content` None: the key has them itself. The server has
    not compared them with the key's digests. Made only for a listener that `wants` contents."""

    key: CacheKey
    content: ChunkContent | None


class TierCall(Message, frozen=True, array_like=True):
    """A call to a tier for a LOOKUP: `began` is of the server's monotonic clock; `found` of `values` were there."""

    tier: str
    operation: str
    began: float
    seconds: float
    values: int
    found: int
    ok: bool


class Finished(Message, frozen=True):
    """A finished LOOKUP, STORE or RETRIEVE, whichever way its bytes took; docs/status.md has the fields.

    `number` counts from 1 where a server answers with it, else it is 0. `at` and `cause_at` are of the wall clock,
    `monotonic` of the server's monotonic clock, in seconds. `missing` is the first token of the first chunk that was
    missing, -1 for none; `added_tokens` is -1 where it is not known. `tier_calls`: a sampled LOOKUP's first."""

    number: int
    request: str
    at: float
    monotonic: float
    seconds: float
    request_id: str
    client: str
    pid: int
    session_id: int
    model: str
    namespace: str
    outcome: str
    start: int = 0
    asked_tokens: int = 0
    l1_tokens: int = 0
    l2_tokens: int = 0
    missing: int = -1
    chunk_tokens: int = 0
    reason: str = ""
    detail: str = ""
    cause_at: float = 0.0
    idle_s: float = 0.0
    by: str = ""
    path: str = ""
    objects: int = 0
    nbytes: int = 0
    tenant: str = ""
    trace: str = ""
    tier_calls: tuple[TierCall, ...] = ()
    load_s: float = 0.0
    compute_s: float = 0.0
    added_tokens: int = -1


class RequestRecord(Finished, frozen=True, gc=False):
    """A LOOKUP, STORE or RETRIEVE has ended. Of a LOOKUP `prefix` is the namespace with the digest of the first chunk,
    b"" if the namespace is not known, and `saved_s` the time in which its engine would have computed the hit. These are
    not for others than listeners."""

    prefix: bytes = b""
    saved_s: float = 0.0


Record = Added | Removed | Accessed | Registered | RequestRecord

Contents = Literal["none", "plain", "salted"]
"""Which prompts' contents clients are to send to the server: none; those of prompts without a salt; all."""


class Batch(NamedTuple):
    """Records in the order in which they were made, after `lost` that this listener has missed."""

    records: Sequence[Record]
    lost: int = 0


class Records(ABC):
    """The records for one listener, from its start to the server's end; for one thread."""

    ended: bool
    """Whether the server ends: what `take` returns from now on is the last."""
    handed_over: bool
    """Once it `ended`: whether the next server takes over L1 unchanged."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """The number of records that this listener has not taken yet. Thread-safe."""

    @property
    @abstractmethod
    def lost(self) -> int:
        """The number of records that this listener has missed, those before the next batch included. Thread-safe."""

    @abstractmethod
    def take(self) -> Batch:
        """Return the waiting records at once, perhaps none."""

    @abstractmethod
    def __iter__(self) -> Iterator[Batch]:
        """Yield batches until the server ends, the last ones included. Waits for each, some 50 ms at a time."""


class ChunkShape(NamedTuple):
    """The parts of a chunk of one namespace and salt: the model, and the key prefix of each object that a hit needs. An
    object's key is `prefix + digest`."""

    model: str
    chunk_tokens: int
    prefixes: Sequence[bytes]


class Sockets(ABC):
    """ZMQ sockets of a listener that other programs reach on the server's own terms: over ipc:// processes of this user
    and of `[server] admit_uids`, over tcp:// the clients that `[server.curve]` admits. For one thread.

    While the server has few descriptors left, it admits no new local peer."""

    refused: int
    """How many peers had an unknown key."""
    guard: zmq.Socket[bytes] | None
    """To be polled; once readable, call `serve_guard`: until then no peer over tcp:// gets in. None: nothing."""

    @abstractmethod
    def socket(self, kind: int) -> zmq.Socket[bytes]:
        """Return a new socket of a ZMQ type, which `close` closes."""

    @abstractmethod
    def bind(self, socket: zmq.Socket[bytes], endpoint: str, *, where: str) -> None:
        """Bind one of these sockets. Blocks for some seconds while an earlier server still has the endpoint. Raises
        `EndpointError`, with `where` as the place that named it."""

    @abstractmethod
    def serve_guard(self) -> None:
        """Decide which connecting peers are admitted. Never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Close the sockets and remove the files of ipc:// endpoints. Blocks as long as the sockets linger."""


class ListenerContext(ABC):
    """The server's offers to a listener. `where` names the listener's table. Thread-safe except for `sockets`."""

    where: str
    server: ServerTerms
    hasher: KeyHasher

    @abstractmethod
    def present(self, keys: Sequence[PackedKey]) -> Sequence[bool]:
        """Return which of `keys` are in L1 now."""

    @abstractmethod
    def shape(self, namespace: bytes, cache_salt: str) -> ChunkShape | None:
        """Return the parts of a chunk of a namespace and salt, None for a namespace that is not registered."""

    @abstractmethod
    def sockets(self, *, insecure: bool = False) -> Sockets:
        """Return sockets of the calling thread or, until `Listener.start` returns, of the listener's; `insecure`: any
        peer may use those over tcp://, in plain text."""


class Listener(ABC):
    """Reads records. `wants` chooses the token ids that clients send, which costs time on both sides. With
    `block_tokens`, the listener's block size, chunks whose size depends on the model consist of whole blocks."""

    wants: Contents = "none"
    block_tokens: int = 1

    def start(self, *, keeps: bool) -> None:  # noqa: B027  most have nothing to open
        """Open files and sockets, before the server serves. `keeps`: the objects in L1 outlive the server. Raises
        `KVFrameworkError`, and the server does not start. Blocks for seconds at most."""

    @abstractmethod
    def listen(self, records: Records) -> None:
        """Read the records: called once, in a separate thread, and return soon after they end. The server waits for
        that for 2 s. An exception ends the listener, and is logged and shown in the status document."""

    def status(self) -> Mapping[str, object]:
        """Return its part of the status document, JSON types only. From any thread; must not block. A text under
        `problem` is a problem of the server while it is not empty."""
        return {}


@dataclass(frozen=True, kw_only=True)
class ListenerProvider(Provider[O]):
    """A listener, made once."""

    kind = "listener"
    create: Callable[[O, ListenerContext], Listener]
