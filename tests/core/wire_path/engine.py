"""An engine with paged memory, whose transport moves its bytes over the wire."""

from __future__ import annotations

from kvframework.client import KVClient, RequestHashes, SchedulerAdapter, WorkerAdapter
from tests.support.lazy import torch

BLOCK, CHUNK = 16, 256
PATIENCE_S = 30.0
AXES = ["plane", "block", "token", "head", "dim"]


class Engine:
    """`wide` elements of one token, one layer, one plane; one object is 2 * 2 * 256 * 4 * `wide` bytes."""

    def __init__(
        self, client: KVClient, instance_id: int = 1, *, path: str = "auto", blocks: int = 64, wide: int = 8
    ) -> None:
        self.client = client
        self.kv = {f"layer{i}": torch.randn(2, blocks, BLOCK, 2, wide // 2) for i in range(2)}
        self.worker = WorkerAdapter(
            client,
            instance_id=instance_id,
            model_name="m",
            layout_options={"axes": AXES},
            transport_options={"path": path},
        )
        self.registration = self.worker.register_kv_caches(self.kv, block_size=BLOCK)
        self.scheduler = SchedulerAdapter(
            client, model_name="m", namespace=self.registration.namespace, chunk_tokens=CHUNK
        )

    def request(self, tokens: list[int], request_id: str = "r") -> RequestHashes:
        request = RequestHashes(self.client.hasher, CHUNK, request_id=request_id)
        request.extend(tokens)
        return request

    def store(self, request: RequestHashes, blocks: list[int]) -> bool:
        self.last = self.worker.submit_store(request, 0, len(blocks) * BLOCK, [blocks])
        return self.last.result(PATIENCE_S).ok

    def retrieve(self, request: RequestHashes, blocks: list[int], skip: int = 0) -> bool:
        future = self.worker.submit_retrieve(request, 0, len(blocks) * BLOCK, [blocks], skip_first_n_tokens=skip)
        return future.result(PATIENCE_S).ok

    def tokens(self, blocks: list[int]) -> torch.Tensor:
        """[layers, planes, tokens, heads, dim] of the blocks."""
        return torch.stack([kv[:, blocks].flatten(1, 2) for kv in self.kv.values()])
