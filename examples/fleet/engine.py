"""An engine in small: a prompt a line on standard input, a JSON list of tokens; a line of JSON for each on the output.

It loads what its node's server has of a prompt, computes the rest, and stores it, as in docs/engines/own_engine.md. Its
"model" takes a fixed time for each token, so that a miss costs the same on every machine; and what was loaded is
compared with what would have been computed, element by element.
"""

from __future__ import annotations

import json
import random
import secrets
import sys
import time
from collections.abc import Iterator

import torch

from kvframework.client import KVClient, RequestHashes, WorkerAdapter
from kvframework.errors import KVFrameworkError

LAYERS, BLOCKS, BLOCK, HEADS, DIM = 4, 256, 16, 4, 64  # 8 KiB a token
PREFILL_TOKENS_S = 8000
LOAD_S = 2.0  # for L2; a tier's own timeout_s is shorter
torch.set_num_threads(1)  # several wait for each other, for seconds where the machine is busy


class Engine:
    """Answers one prompt at a time, with its server or without."""

    def __init__(self, endpoint: str) -> None:
        self.kv = [torch.zeros(2, BLOCKS, BLOCK, HEADS, DIM) for _ in range(LAYERS)]
        self.client = KVClient(endpoint, name="fleet-engine")
        self.worker = WorkerAdapter(
            self.client,
            instance_id=secrets.randbits(62),
            model_name="my-model",
            layout_options={"axes": ["plane", "block", "token", "head", "dim"]},
        )
        layers = {f"layer.{index}": tensor for index, tensor in enumerate(self.kv)}
        self.chunk = self.worker.register_kv_caches(layers, block_size=BLOCK).desc.chunk_tokens
        self.scheduler = self.worker.scheduler()

    def answer(self, prompt: list[int]) -> dict[str, object]:
        """The seconds until the first token, the tokens that came from the cache, the wrong elements among them, and
        what became of the store."""
        began = time.monotonic()
        request = RequestHashes(self.client.hasher, self.chunk, request_id=secrets.token_hex(8))
        request.extend(prompt)
        blocks = random.sample(range(BLOCKS), -(-len(prompt) // BLOCK))
        hit = self.load(request, blocks, len(prompt))
        self.compute(prompt, blocks, hit)
        ttft_s = time.monotonic() - began
        wrong = sum(int((self.held(layer, blocks, hit) != true).sum()) for layer, true in self.truth(prompt, 0, hit))
        return {"ttft_s": ttft_s, "hit_tokens": hit, "wrong": wrong, "stored": self.store(request, blocks, hit)}

    def load(self, request: RequestHashes, blocks: list[int], tokens: int) -> int:
        found = self.scheduler.lookup(request, 0, tokens - 1, wait_s=LOAD_S)
        try:
            found = self.scheduler.wait(found, LOAD_S)
            if not found.hit_tokens:
                return 0
            future = self.worker.submit_retrieve(request, 0, found.hit_tokens, [blocks[: found.hit_tokens // BLOCK]])
            while request.request_id not in self.worker.get_finished()[1]:
                time.sleep(0.0005)
            return found.hit_tokens if future.exception() is None and future.result().ok else 0
        finally:
            self.scheduler.free(found)

    def compute(self, prompt: list[int], blocks: list[int], start: int) -> None:
        at = torch.arange(start, len(prompt))
        places = torch.tensor(blocks)[at // BLOCK], at % BLOCK
        for layer, true in self.truth(prompt, start, len(prompt)):
            self.kv[layer][:, places[0], places[1]] = true
        time.sleep((len(prompt) - start) / PREFILL_TOKENS_S)

    def truth(self, prompt: list[int], start: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Layer by layer the KV of these tokens [planes, tokens, heads, dim]; a token's depends on all before it."""
        prefix = (torch.tensor(prompt).cumsum(0) % 65521)[start:end].view(1, -1, 1, 1)
        element = torch.arange(2 * HEADS * DIM).view(2, 1, HEADS, DIM)
        for layer in range(LAYERS):
            yield layer, (prefix * (element + 1000 * layer + 1) % 65521).float()

    def held(self, layer: int, blocks: list[int], tokens: int) -> torch.Tensor:
        return self.kv[layer][:, blocks].flatten(1, 2)[:, :tokens]

    def store(self, request: RequestHashes, blocks: list[int], hit: int) -> str:
        end = request.hashed_tokens
        if end <= hit:
            return "nothing new"
        future = self.worker.submit_store(request, hit, end, [blocks[hit // BLOCK : end // BLOCK]])
        while request.request_id not in self.worker.get_finished()[0]:
            time.sleep(0.0005)
        self.scheduler.end_request(request.request_id)
        return "lost" if future.exception() or not future.result().ok else "stored"


if __name__ == "__main__":
    engine = Engine(sys.argv[1])
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            said = engine.answer(json.loads(line))
        except KVFrameworkError as error:
            said = {"error": str(error)}
        print(json.dumps(said), flush=True)
