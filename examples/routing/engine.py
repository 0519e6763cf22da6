"""An engine in small, behind HTTP: `POST /generate {"tokens": [...]}` answers how many tokens it did not compute.

It loads what its node's server has of a prompt, computes the rest, and stores it, as in docs/engines/own_engine.md. The
one thing that routers need of it is `keep_tokens`: the server tells them which tokens the stored KV is of.
"""

from __future__ import annotations

import json
import random
import secrets
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from kvframework.client import KVClient, RequestHashes, WorkerAdapter

LAYERS, BLOCKS, BLOCK, HEADS, DIM = 4, 256, 16, 2, 8


class Engine:
    """Answers one prompt at a time."""

    def __init__(self, endpoint: str) -> None:
        self.kv = {f"layer.{index}": torch.zeros(2, BLOCKS, BLOCK, HEADS, DIM) for index in range(LAYERS)}
        self.client = KVClient(endpoint, name="routed-engine")
        self.worker = WorkerAdapter(
            self.client,
            instance_id=secrets.randbits(62),
            model_name="my-model",
            layout_options={"axes": ["plane", "block", "token", "head", "dim"]},
        )
        self.chunk = self.worker.register_kv_caches(self.kv, block_size=BLOCK).desc.chunk_tokens
        self.scheduler = self.worker.scheduler()
        self.lock = threading.Lock()

    def generate(self, prompt: list[int]) -> int:
        """Returns how many tokens came from the cache."""
        with self.lock:
            request = RequestHashes(
                self.client.hasher,
                self.chunk,
                request_id=secrets.token_hex(8),
                keep_tokens=self.client.wants_tokens(""),
            )
            request.extend(prompt)
            blocks = random.sample(range(BLOCKS), -(-len(prompt) // BLOCK))
            hit = self.load(request, blocks, len(prompt))
            for at in range(hit, len(prompt)):  # the model
                for layer, tensor in enumerate(self.kv.values()):
                    tensor[:, blocks[at // BLOCK], at % BLOCK] = float((prompt[at] * (at + 1) + layer) % 251)
            self.store(request, blocks, hit)
            return hit

    def load(self, request: RequestHashes, blocks: list[int], tokens: int) -> int:
        found = self.scheduler.wait(self.scheduler.lookup(request, 0, tokens - 1), 2.0)
        try:
            hit = found.hit_tokens
            if not hit:
                return 0
            future = self.worker.submit_retrieve(request, 0, hit, [blocks[: hit // BLOCK]])
            while request.request_id not in self.worker.get_finished()[1]:
                time.sleep(0.001)
            return hit if future.result().ok else 0
        finally:
            self.scheduler.free(found)

    def store(self, request: RequestHashes, blocks: list[int], hit: int) -> None:
        end = request.hashed_tokens
        if end > hit:
            self.worker.submit_store(request, hit, end, [blocks[hit // BLOCK : end // BLOCK]])
            while request.request_id not in self.worker.get_finished()[0]:
                time.sleep(0.001)
        self.scheduler.end_request(request.request_id)


class Handler(BaseHTTPRequestHandler):
    engine: Engine

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["tokens"]
        answer = json.dumps({"tokens": len(prompt), "hit_tokens": self.engine.generate(prompt)}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    Handler.engine = Engine(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
