"""The `EvictionPolicy` contract: the order in which objects leave L1. Called under the storage lock, never blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from kvframework.api.keys import PackedKey
from kvframework.api.plugin import O, Provider, hookimpl

__all__ = ["EvictionPolicy", "EvictionProvider", "Hint", "PackedKey", "RequestFacts", "Use", "Why", "hookimpl"]

Use = Literal["store", "lookup", "retrieve", "load", "recovered"]
"""What objects are stored or used by: a STORE, also one that would have stored them again; a LOOKUP; a RETRIEVE; a load
from L2; the start of a server that takes over what an earlier one held."""

Why = Literal["evicted", "removed", "cleared"]
"""Why an object left: for the place or by the watermark; since its bytes were damaged; by CLEAR."""


Hint = Literal["", "done", "keep"]
"""A request's hint about its objects: none; no later request needs them; keep them."""


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the request that stores or uses objects. `at` is the time in seconds on the server's clock, to a tick
    of a tenth of a second, and never goes back: a policy reads no other clock, for replays.

    `request_id` is the engine's, "" for none; `tenant` a name of `[tenants]`, "" for none; `chunk_tokens` the tokens of
    a chunk, 0 if not known. `compute_s` are the seconds in which an engine computes one token of this request again,
    `load_s` those in which a tier loads one byte; None if not known. `hint` is the request's hint for these objects;
    with "keep", `keep_s` is the number of seconds from `at`, objects of a high `priority` (1 to 100) stay longest, and
    `sizes` has the bytes of each key of the call. `held` is the number of bytes of all objects of this policy,
    unfinished stores included; 0 if not known."""

    use: Use
    at: float
    request_id: str = ""
    tenant: str = ""
    chunk_tokens: int = 0
    compute_s: float | None = None
    load_s: float | None = None
    hint: Hint = ""
    keep_s: float = 0.0
    priority: int = 0
    sizes: Sequence[int] = ()
    held: int = 0


class EvictionPolicy(ABC):
    """An order of the objects in L1. The core decides when, and skips pinned and unfinished objects. Where the best
    victim alone does not free the contiguous bytes that an object needs, the core empties the window of the arena that
    holds most of the next victims, and what lies between them: less than twice the needed bytes, or one larger object.

    Called from several threads, one at a time. The time of a call must not grow with the number of objects. The core
    calls `admits`, `on_inserts`, `on_uses`, `on_removes` and `victims`. By default these methods call the other ones,
    one key at a time and without facts."""

    name: str

    @abstractmethod
    def on_insert(self, key: PackedKey, nbytes: int) -> None:
        """`key` was committed and is now readable. Never called twice for a key without `on_remove` between."""

    @abstractmethod
    def on_access(self, key: PackedKey) -> None:
        """`key` was looked up or retrieved. Only for keys in L1."""

    def on_access_many(self, keys: Sequence[PackedKey]) -> None:
        """`on_access` for each of `keys`, in order: the objects of a request, at most 8,192. A key may occur twice."""
        for key in keys:
            self.on_access(key)

    @abstractmethod
    def on_remove(self, key: PackedKey) -> None:
        """`key` left L1, by eviction or otherwise. Only for keys in L1."""

    @abstractmethod
    def victims(self) -> Iterator[PackedKey]:
        """Yield all keys in L1, best victim first. The core may stop anywhere, and calls no other method meanwhile."""

    def admits(
        self, keys: Sequence[PackedKey], sizes: Sequence[int], chunks: Sequence[int], facts: RequestFacts
    ) -> int:
        """Return how many of `keys`, from the first on, are worth a place; the others are not stored. By default all.
        They are absent objects of one STORE or load in the order of the prompt, with their bytes, and for each the
        index of its chunk in the prompt, -1 if not known. Admitted objects may still fail to arrive."""
        return len(keys)

    def on_inserts(
        self, keys: Sequence[PackedKey], sizes: Sequence[int], chunks: Sequence[int], facts: RequestFacts
    ) -> None:
        """`on_insert` for the objects of one request, as in `admits`, but the last chunk first."""
        for key, nbytes in zip(keys, sizes, strict=True):
            self.on_insert(key, nbytes)

    def on_uses(self, keys: Sequence[PackedKey], facts: RequestFacts) -> None:
        """`on_access_many`, with facts about the request."""
        self.on_access_many(keys)

    def on_removes(self, keys: Sequence[PackedKey], why: Why) -> None:
        """`on_remove` for each of `keys`, in the order in which they left."""
        for key in keys:
            self.on_remove(key)


@dataclass(frozen=True, kw_only=True)
class EvictionProvider(Provider[O]):
    """An eviction policy. `create` makes the policy of one server's L1."""

    kind = "eviction"
    create: Callable[[O], EvictionPolicy]
