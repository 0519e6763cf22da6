"""An engine with paged memory beside a server on the same node."""

from __future__ import annotations

from kvframework.client import KVClient, RequestHashes, SchedulerAdapter, WorkerAdapter
from tests.support.lazy import torch

LAYERS, BLOCKS, BLOCK, HEADS, DIM = 2, 64, 16, 2, 4
AXES = ["plane", "block", "token", "head", "dim"]
CHUNK = 256


class Engine:
    """An engine with paged memory of its own."""

    def __init__(self, client: KVClient, instance_id: int = 1, **identity: object) -> None:
        self.kv = {f"layer{i}": torch.randn(2, BLOCKS, BLOCK, HEADS, DIM) for i in range(LAYERS)}
        self.worker = WorkerAdapter(
            client,
            instance_id=instance_id,
            model_name="m",
            layout="paged",
            layout_options={"axes": AXES},
            **identity,  # type: ignore[arg-type]
        )
        registration = self.worker.register_kv_caches(self.kv, block_size=BLOCK)
        self.scheduler = SchedulerAdapter(
            client, model_name="m", namespace=registration.namespace, chunk_tokens=registration.desc.chunk_tokens
        )
        self.client = client

    def request(self, tokens: list[int], request_id: str = "r") -> RequestHashes:
        request = RequestHashes(self.client.hasher, CHUNK, request_id=request_id)
        request.extend(tokens)
        return request
