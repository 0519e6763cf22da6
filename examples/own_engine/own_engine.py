"""An engine of one's own, in small: it loads what the server has of a prompt, computes the rest, and stores it.

Run it twice: the second process loads what the first has stored.
"""

from __future__ import annotations

import random
import secrets
import time

import torch

from kvframework.client import KVClient, RequestHashes, WorkerAdapter
from kvframework.errors import KVFrameworkError, ServerGone

LAYERS, BLOCKS, BLOCK, HEADS, DIM = 4, 128, 16, 2, 8


class Engine:
    """The KV memory of the model, and a "model" whose next token depends on all KV of the prompt."""

    def __init__(self) -> None:
        self.kv = {f"layer.{index}": torch.zeros(2, BLOCKS, BLOCK, HEADS, DIM) for index in range(LAYERS)}
        self.cache = Cache(self.kv)

    def answer(self, prompt: list[int]) -> None:
        blocks = random.sample(range(BLOCKS), -(-len(prompt) // BLOCK))  # an engine's allocator gives any free ones
        cached = self.cache.works()
        hit = self.cache.load(prompt, blocks) if cached else 0
        for at in range(hit, len(prompt)):
            for layer, tensor in enumerate(self.kv.values()):
                tensor[:, blocks[at // BLOCK], at % BLOCK] = float((prompt[at] * (at + 1) + layer) % 251)
        seen = [tensor[:, blocks].flatten(1, 2)[:, : len(prompt)] for tensor in self.kv.values()]  # planes, tokens, ...
        print(f"loaded {hit} of {len(prompt)} tokens, the next token is {sum(int(kv.sum()) for kv in seen) % 1000}")
        if cached:
            self.cache.store(blocks, hit)


class Cache:
    """The engine's half of the cache. After any failure the engine computes: it is never worse off than without."""

    def __init__(self, kv: dict[str, torch.Tensor]) -> None:
        self.client = KVClient(name="own-engine")  # KVFRAMEWORK_ENDPOINT, or the private socket of this user
        self.worker = WorkerAdapter(
            self.client,
            instance_id=secrets.randbits(62),  # one for each rank, different from all others of the server
            model_name="my-model",
            revision="weights-2026-11",  # with the name: all that makes KV differ
            layout_options={"axes": ["plane", "block", "token", "head", "dim"]},
        )
        self.kv = kv
        self.refused = False
        self.register()

    def register(self) -> None:
        try:
            registered = self.worker.register_kv_caches(self.kv, block_size=BLOCK)
        except KVFrameworkError as error:  # no server, or a reason that it names
            print(f"runs without a cache: {error}")
            self.refused = not isinstance(error, ServerGone)
            return
        self.chunk = registered.desc.chunk_tokens
        self.scheduler = self.worker.scheduler()

    def works(self) -> bool:
        if self.worker.registration is None and self.client.usable and not self.refused:
            self.register()  # there was no server at the start, and there is one now
        return self.worker.registration is not None

    def load(self, prompt: list[int], blocks: list[int]) -> int:
        """Fill the first blocks; return how many tokens of the prompt they hold. The last token is always computed."""
        self.request = RequestHashes(self.client.hasher, self.chunk, request_id=secrets.token_hex(8))
        self.request.extend(prompt)
        found = asked = self.scheduler.lookup(self.request, 0, len(prompt) - 1)
        hit = 0
        try:
            for found in self.scheduler.arrivals(asked, 2.0):  # seconds for L2, which loads the rest meanwhile
                if found.hit_tokens > hit:
                    if not self.retrieve(hit, found.hit_tokens, blocks):
                        break
                    hit = found.hit_tokens
            return hit
        finally:
            self.scheduler.free(found)

    def retrieve(self, start: int, end: int, blocks: list[int]) -> bool:
        future = self.worker.submit_retrieve(self.request, start, end, [blocks[start // BLOCK : end // BLOCK]])
        while self.request.request_id not in self.worker.get_finished()[1]:
            time.sleep(0.001)  # an engine runs a step of other requests here
        return future.exception() is None and future.result().ok

    def store(self, blocks: list[int], hit: int) -> None:
        """Store the whole chunks behind the hit. The blocks must not change until `get_finished` names them."""
        end = self.request.hashed_tokens
        if end > hit:
            future = self.worker.submit_store(self.request, hit, end, [blocks[hit // BLOCK : end // BLOCK]])
            while self.request.request_id not in self.worker.get_finished()[0]:
                time.sleep(0.001)
            print(f"the store's outcome: {future.exception() or future.result()}")
        self.scheduler.end_request(self.request.request_id)

    def close(self) -> None:
        self.worker.close()  # after it the tensors may be freed
        self.client.close()


if __name__ == "__main__":
    engine = Engine()
    engine.answer([7 * position % 1000 for position in range(1000)])
    engine.cache.close()
