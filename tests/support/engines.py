"""Engines with paged memory: `PagedEngine` at a server, by the adapters, and `ArenaEngine` at a double of one.

An engine that speaks the wire by hand and checks every byte is `tests.core.tiers.engine.Engine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvframework.api.keys import CacheKey
from kvframework.api.layout import check_skip
from kvframework.api.transport import Registration, Transfer
from kvframework.client import KVClient, RequestHashes, SchedulerAdapter, WorkerAdapter
from kvframework.client.kv_client import checked_transfer
from tests.core.defaults.arena_link import ArenaLink
from tests.support.lazy import torch

LAYERS, BLOCKS, BLOCK, HEADS, DIM, CHUNK = 2, 64, 16, 2, 4, 256
AXES = ["plane", "block", "token", "head", "dim"]
PATIENCE_S = 30.0


class PagedEngine:
    """A worker and a scheduler of the model "m". `wide` elements of one token, one layer, one plane; one object is
    2 * 2 * 256 * 4 * `wide` bytes. `kv` is other memory, `options` are the worker's."""

    def __init__(
        self,
        client: KVClient,
        instance_id: int = 1,
        *,
        kv: Mapping[str, Any] | None = None,
        blocks: int = BLOCKS,
        wide: int = HEADS * DIM,
        block_size: int = BLOCK,
        path: str = "",
        **options: Any,
    ) -> None:
        self.client = client
        shape = (2, blocks, BLOCK, HEADS, wide // HEADS)
        self.kv = {f"layer{i}": torch.randn(shape) for i in range(LAYERS)} if kv is None else kv
        options = {"layout_options": {"axes": AXES}, **options}
        if path:
            options["transport_options"] = {"path": path}
        self.worker = WorkerAdapter(client, instance_id=instance_id, model_name="m", **options)
        self.registration = self.worker.register_kv_caches(self.kv, block_size=block_size)
        self.chunk = self.registration.desc.chunk_tokens
        self.scheduler = SchedulerAdapter(
            client,
            model_name="m",
            namespace=self.registration.namespace,
            world_size=options.get("world_size", 1),
            chunk_tokens=self.chunk,
        )

    def request(self, tokens: Sequence[int], request_id: str = "r") -> RequestHashes:
        request = RequestHashes(self.client.hasher, self.chunk, request_id=request_id)
        request.extend(tokens)
        return request

    def store(self, request: RequestHashes, blocks: Sequence[int]) -> bool:
        self.last = self.worker.submit_store(request, 0, len(blocks) * BLOCK, [blocks])
        return self.last.result(PATIENCE_S).ok

    def retrieve(self, request: RequestHashes, blocks: Sequence[int], skip: int = 0) -> bool:
        future = self.worker.submit_retrieve(request, 0, len(blocks) * BLOCK, [blocks], skip_first_n_tokens=skip)
        return future.result(PATIENCE_S).ok

    def hit(self, request: RequestHashes, end: int | None = None) -> int:
        result = self.scheduler.wait(self.scheduler.lookup(request, end=end), PATIENCE_S)
        self.scheduler.free(result)
        return result.hit_tokens

    def tokens(self, blocks: Sequence[int]) -> torch.Tensor:
        """[layers, planes, tokens, heads, dim] of the blocks."""
        return torch.stack([kv[:, blocks].flatten(1, 2) for kv in self.kv.values()])


class ArenaEngine:
    """Memory that `cpu_gather` copies to and from `link`, a double of the server."""

    def __init__(
        self,
        kv: Mapping[str, Any],
        layout: Any,
        *,
        block_size: int,
        chunk: int,
        link: ArenaLink | None = None,
        path: str = "auto",
        kernel: Any = None,
    ) -> None:
        from kvf_cpu_gather.context import CpuGather

        self.kv, self.layout = kv, layout
        self.declared = layout.describe(kv, block_size=block_size)
        self.desc = layout.object_desc(self.declared, chunk)
        self.link = link or ArenaLink(self.desc)
        self.transport = CpuGather(self.link, path, kernel)
        self.registration = Registration(1, 0, bytes(16), self.declared, self.desc)
        self.transport.on_registered(self.registration, layout)

    def key(self, chunks: int) -> CacheKey:
        """The digests of its chunks are 32 ones, 32 twos and so on."""
        digests = b"".join(bytes([index]) * 32 for index in range(1, chunks + 1))
        return CacheKey("m", 1, 0, bytes(16), 0, chunks * self.desc.chunk_tokens, "r", digests=digests)

    def transfer(self, ids: Sequence[Sequence[int]], key: CacheKey, *, storing: bool, event: Any = None) -> Transfer:
        """As the core makes it."""
        return checked_transfer(self.registration, key, self.kv, ids, event, storing=storing)

    def store(self, ids: Sequence[Sequence[int]], chunks: int) -> Any:
        return self.transport.store(self.transfer(ids, self.key(chunks), storing=True))

    def load(self, ids: Sequence[Sequence[int]], chunks: int, skip: int = 0) -> Any:
        check_skip(self.declared, skip)
        return self.transport.load(self.transfer(ids, self.key(chunks), storing=False), skip)

    def blocks(self, group: int = 0) -> torch.Tensor:
        """What the engine holds now, as bytes `[plane, layer, block, slot, head, dim bytes]`."""
        views = self.layout.block_views(self.declared, self.kv)[group]
        stacked = torch.stack([torch.stack(list(plane)) for plane in views])
        return stacked.contiguous().view(torch.uint8)
