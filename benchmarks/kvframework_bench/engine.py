"""An engine instance with paged KV memory: stores of its source blocks, retrieves into its target blocks.

It uses `WorkerAdapter`, as an engine integration does. For one thread; every call blocks until the bytes are
moved. `PagedMemory` imports torch.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from kvframework.api.keys import DIGEST_BYTES
from kvframework.client import KVClient, RequestHashes, SchedulerAdapter, WorkerAdapter
from kvframework.wire import messages as m
from kvframework_bench.copy_reference import TORCH_ENDS_S
from kvframework_bench.errors import BenchFailed, WrongBytes
from kvframework_bench.server import emptied
from kvframework_bench.workload import BLOCK_TOKENS, TRANSPORT, Shape

if TYPE_CHECKING:
    import torch

AXES = ("plane", "block", "token", "head", "dim")
_POISON = 0xA5


class Memory(Protocol):
    """An engine's KV, one tensor a layer, with the blocks of one request to store, and as many to load into."""

    @property
    def kv(self) -> Mapping[str, Any]: ...
    @property
    def source(self) -> Sequence[int]: ...
    @property
    def target(self) -> Sequence[int]: ...

    def poison(self) -> None:
        """Fill the target, so that missing loads are seen."""

    def verify(self) -> None:
        """Raise `WrongBytes` unless the target equals the source byte for byte."""


def chosen_blocks(shape: Shape, *, shuffled: bool, seed: int = 1) -> tuple[list[int], list[int]]:
    """Return the ids of the blocks of a memory's source and of its target."""
    ids = list(range(2 * shape.blocks))
    if shuffled:
        random.Random(seed).shuffle(ids)
    return ids[: shape.blocks], ids[shape.blocks :]


def dims_of(shape: Shape) -> tuple[int, ...]:
    """Return the shape of a layer's tensor, by `AXES`."""
    return (2, 2 * shape.blocks, BLOCK_TOKENS, shape.heads, shape.head_dim)


def wrong_bytes(name: str, number: int, plane: int, token: int) -> WrongBytes:
    """Return the error for a tensor in which loaded bytes are wrong, the first one at this place."""
    return WrongBytes(
        f"{number} retrieved bytes of {name} differ from the stored bytes",
        where=f"plane {plane}, token {token}",
        hint="this is a bug of the transport; no figures are reported",
    )


class PagedMemory:
    """One tensor a layer, `[plane, block, token, head, dim]`, with `source` and `target` blocks of one request each.

    All of it is random and so touched. `shuffled` blocks are scattered, as after a while in an engine; else each
    request's blocks are neighbours.
    """

    def __init__(self, shape: Shape, *, shuffled: bool, seed: int = 1) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, shape.dtype)
        self.kv: dict[str, torch.Tensor] = {}
        for layer in range(shape.layers):
            words = torch.empty(shape.nbytes * 2 // shape.layers // 8, dtype=torch.int64)
            self.kv[f"layers.{layer}"] = words.random_(generator=generator).view(dtype).view(dims_of(shape))
        self.source, self.target = chosen_blocks(shape, shuffled=shuffled, seed=seed)

    def poison(self) -> None:
        """Fill the target with one repeated byte, so that missing loads are seen."""
        for kv in self.kv.values():
            _bytes(kv)[:, self.target] = _POISON

    def verify(self) -> None:
        """Raise `WrongBytes`, naming the first place, unless the target equals the source byte for byte."""
        for name, kv in self.kv.items():
            data = _bytes(kv)
            wrong = (data[:, self.source] != data[:, self.target]).nonzero()
            if len(wrong):
                plane, block, token = wrong[0].tolist()[:3]
                raise wrong_bytes(name, len(wrong), plane, block * BLOCK_TOKENS + token)


def _bytes(kv: torch.Tensor) -> torch.Tensor:
    # NaNs are unequal to themselves; bytes are not.
    import torch

    return kv.view(torch.uint8)


def block_ids(blocks: Sequence[int]) -> list[list[int]]:
    """Return the ids of the one layer group."""
    return [list(blocks)]


_TIMEOUT_S = 60.0


class Transfers:
    """An instance's transfers. The constructor registers, and raises the errors of a registration."""

    def __init__(
        self,
        client: KVClient,
        shape: Shape,
        memory: Memory,
        options: Mapping[str, object],
        *,
        instance_id: int = 1,
        transport: str = TRANSPORT,
    ) -> None:
        self.memory = memory
        self.model_name = f"bench {shape.name}"
        self._client = client
        self._tokens = shape.tokens
        self._worker = WorkerAdapter(
            client,
            instance_id=instance_id,
            model_name=self.model_name,
            transport=transport,
            transport_options=options,
            layout_options={"axes": AXES},
        )
        registration = self._worker.register_kv_caches(memory.kv, block_size=BLOCK_TOKENS)
        desc = registration.desc
        self.namespace = registration.namespace
        self.chunk_tokens = desc.chunk_tokens
        self.object_bytes = desc.nbytes
        self._chunks = shape.tokens // desc.chunk_tokens
        # Digests are computed once a request, so not here, where transfers are timed.
        self.request = RequestHashes(client.hasher, desc.chunk_tokens, request_id="bench")
        self.request.extend(range(shape.tokens))
        self._source = block_ids(memory.source)
        self._lookups: SchedulerAdapter | None = None

    def __enter__(self) -> Transfers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.close()

    def scheduler(self) -> SchedulerAdapter:
        """The scheduler's side of the same engine."""
        return self._worker.scheduler()

    def store(self) -> float:
        """Return the seconds of one store into an empty L1, until it is a hit. Raises `BenchFailed` unless all is
        stored."""
        cleared = emptied(self._client)
        if cleared.in_use:
            raise BenchFailed(f"L1 could not be emptied before a store: {cleared.in_use} objects are in use")
        return self._stored(self.request)

    def store_new(self) -> float:
        """Return the seconds of one store of a new prompt, for which L1 evicts. Raises as `store` does."""
        # Digests as of another prompt: no time is spent on hashing.
        digests = os.urandom(DIGEST_BYTES * self._chunks)
        return self._stored(RequestHashes(self._client.hasher, self.chunk_tokens, request_id="new", digests=digests))

    def retrieve(self) -> float:
        """Return the seconds of one retrieve of the stored prompt. Raises `BenchFailed` if it was a miss."""
        return self.retrieve_part(0, self._tokens)

    def retrieve_found(self) -> float:
        """Return the seconds of one retrieve of the stored prompt, after its lookup, as engines do. Raises as
        `retrieve` does."""
        if self._lookups is None:
            self._lookups = self._worker.scheduler()
        found = self._lookups.lookup(self.request)
        seconds = self.retrieve()
        # At once: a store begins with an empty L1, and would wait for the next PING.
        self._client.request("FREE_LOOKUP_LOCKS", m.TicketRef(found.ticket), m.Freed)
        self._client.free_soon(*(each.lease for each in found.take_grants()))
        return seconds

    def retrieve_part(self, start: int, end: int) -> float:
        """Return the seconds of one retrieve of these tokens of it, whole chunks. Raises as `retrieve` does."""
        target = block_ids(self.memory.target[start // BLOCK_TOKENS : end // BLOCK_TOKENS])
        started = time.perf_counter()
        outcome = self._worker.submit_retrieve(self.request, start, end, target).result(_TIMEOUT_S)
        seconds = time.perf_counter() - started
        self._worker.get_finished()
        if not outcome.ok:
            raise BenchFailed("a retrieve of stored chunks is a miss", hint="the log above says why")
        return seconds

    def verify(self) -> float:
        """Return the seconds of a `retrieve` into poisoned blocks. Raises `WrongBytes` unless they equal the stored
        ones."""
        self.memory.poison()
        time.sleep(TORCH_ENDS_S)
        seconds = self.retrieve()
        self.memory.verify()
        return seconds

    def _stored(self, request: RequestHashes) -> float:
        started = time.perf_counter()
        future = self._worker.submit_store(request, 0, self._tokens, self._source)
        outcome = future.result(_TIMEOUT_S)
        seconds = time.perf_counter() - started
        self._worker.get_finished()
        if not outcome.ok or outcome.stored != self._chunks:
            raise BenchFailed(f"a store of {self._chunks} chunks ended with {outcome}")
        return seconds
