"""The chunks that orders name, and an order under way with them; which of them two orders share, or a deletion may
mean."""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, NamedTuple

import msgspec

from kvf_control.orders import Deletion, Directive, Prefetch
from kvframework.api.hasher import KeyHasher
from kvframework.api.keys import DIGEST_BYTES, Retain
from kvframework.client import KVClient, LookupResult, RequestHashes, SchedulerAdapter


class Place(NamedTuple):
    """A namespace, in hexadecimal digits, and the model, the chunks and the ranks of the engines that use it."""

    namespace: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    model: str
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    world_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


@dataclass(eq=False)
class Run:
    """Chunks of one namespace, under one salt."""

    place: Place
    adapter: SchedulerAdapter
    hasher: KeyHasher
    hashes: RequestHashes
    salt: str
    nbytes: int
    result: LookupResult = field(default_factory=lambda: LookupResult(0))

    @property
    def scope(self) -> tuple[str, str]:
        return self.place.namespace, self.salt

    @cached_property
    def digests(self) -> bytes:
        return self.hashes.digests(self.hashes.hashed_tokens)

    def ask(self) -> None:
        """Look up once more, and then free what the lookup before has pinned."""
        before, self.result = self.result, self.adapter.lookup(self.hashes, ahead=True)
        self.adapter.free(before)

    def free(self) -> None:
        self.adapter.free(self.result)

    def again(self, retain: Retain | None = None) -> Run:
        """Return the same chunks with what is to be expected of them."""
        hashes = RequestHashes(
            self.hasher,
            self.adapter.chunk_tokens,
            request_id="control",
            cache_salt=self.salt,
            digests=self.digests,
            retain=(retain,) if retain else (),
        )
        return Run(self.place, self.adapter, self.hasher, hashes, self.salt, self.nbytes)


@dataclass(eq=False)
class Held:
    """An order under way. `until` of a pin is of the monotonic clock, 0 for none."""

    id: str
    do: str
    order: Prefetch
    runs: list[Run]
    until: float = 0.0
    state: str = "loading"
    at: float = field(default_factory=time.time)
    asked_at: float = field(default_factory=time.monotonic)

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes for run in self.runs)

    def told(self) -> Directive:
        return Directive(
            id=self.id,
            do=self.do,
            state=self.state,
            asked_tokens=sum(run.hashes.hashed_tokens for run in self.runs),
            l1_tokens=sum(run.result.hit_tokens for run in self.runs),
            nbytes=self.nbytes,
            tenant=self.order.tenant,
            at=round(self.at, 3),
            until=round(time.time() + self.until - time.monotonic(), 3) if self.until else 0.0,
        )


def new_run(
    client: KVClient, place: Place, salt: str, *, tokens: tuple[int, ...] = (), digests: bytes = b"", nbytes: int = 0
) -> Run:
    """Return the whole chunks that tokens or packed digests name. The client has been connected."""
    adapter = SchedulerAdapter(
        client,
        model_name=place.model,
        namespace=bytes.fromhex(place.namespace),
        chunk_tokens=place.chunk_tokens,
        world_size=place.world_size,
    )
    hasher = client.hasher
    hashes = RequestHashes(hasher, adapter.chunk_tokens, request_id="control", cache_salt=salt, digests=digests)
    hashes.extend(tokens)
    return Run(place, adapter, hasher, hashes, salt, nbytes)


def shared(one: Run, other: Run) -> int:
    """Return with how many chunks both begin: a digest stands for all before it, too."""
    mine, theirs = one.digests, other.digests
    if one.scope != other.scope or mine[:DIGEST_BYTES] != theirs[:DIGEST_BYTES]:
        return 0
    ends = range(DIGEST_BYTES, min(len(mine), len(theirs)) + 1, DIGEST_BYTES)
    return bisect_left(ends, True, key=lambda end: mine[end - DIGEST_BYTES : end] != theirs[end - DIGEST_BYTES : end])


def may_mean(order: Deletion, held: Held) -> bool:
    """Whether a deletion may be about what is held, which would keep it in L1."""
    for given, own in ((order.tenant, held.order.tenant), (order.conversation, held.order.conversation)):
        if given and own and given != own:
            return False
    return any(_may_mean_run(order, run) for run in held.runs)


def _may_mean_run(order: Deletion, run: Run) -> bool:
    namespace, salt = run.scope
    if order.namespace not in ("", namespace) or (order.salts and salt not in order.salts):
        return False
    first, digests = run.digests[:DIGEST_BYTES], bytes.fromhex("".join(order.digests[:1]))
    if order.tokens:
        hashes = RequestHashes(run.hasher, run.adapter.chunk_tokens, request_id="control")
        hashes.extend(order.tokens[: run.adapter.chunk_tokens])
        digests = hashes.digests(hashes.hashed_tokens)
    return digests in (b"", first)
