"""What a server's node gives to a tier that serves other nodes: who it is, its arena, and objects of L1 to lend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kvframework.api.keys import PackedKey

__all__ = ["Loan", "Node", "NodeIdentity", "PackedKey"]


@dataclass(frozen=True)
class NodeIdentity:
    """Who a server is. `boot_id`, 16 bytes, is new with each start. Servers with another `chunk_size` (tokens) or
    another `hasher` (its fingerprint) give other names to the same content, so they share nothing."""

    boot_id: bytes
    chunk_size: int
    hasher: str


class Loan(AbstractContextManager["Loan"], ABC):
    """One object of L1 as the value that a tier would be given for it, pinned until `close`.

    `nbytes` is the length of that value. Held by one thread.
    """

    nbytes: int

    @abstractmethod
    def parts(self) -> Sequence[memoryview]:
        """Returns the value: a header with a checksum, made now, which reads all of it, and the object's own bytes in
        the arena, which must not be written. Valid until `close`."""

    @abstractmethod
    def close(self) -> None:
        """Gives the object back. Idempotent; does not block."""

    def __exit__(self, *_exc: object) -> None:
        self.close()


class Node(ABC):
    """The node that a tier is part of, from `Tier.attach` until the tier's `close`. Thread-safe; no call waits for L2
    or for an engine.

    `arena_fd` is the descriptor of L1's arena, `arena_bytes` long, for libraries that register memory and for helper
    processes that map it; it stays the server's.
    """

    identity: NodeIdentity
    arena_fd: int
    arena_bytes: int

    @abstractmethod
    def holds(self, keys: Sequence[PackedKey]) -> Sequence[bool]:
        """Returns which of `keys` `lend` would lend now. An object that is not lent may leave at any time."""

    @abstractmethod
    def lend(self, key: PackedKey) -> Loan | None:
        """Lends what L1 has under `key`, or what the server knows of a namespace; None if it has nothing. It asks no
        tier, and is no use of the object for eviction."""

    @abstractmethod
    def models(self) -> Mapping[str, Collection[bytes]]:
        """Returns the namespaces, 16 bytes each, of every model that this server knows."""

    @abstractmethod
    def watch(self, came: Callable[[Sequence[PackedKey]], None]) -> None:
        """Calls `came` with what L1 has, now, and later with the keys that come into it: under the lock of L1, so it
        must be done in microseconds, raise nothing and call nothing of this node."""
