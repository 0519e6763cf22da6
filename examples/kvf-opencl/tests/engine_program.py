"""An engine whose KV lies in SVM, as a program: ENDPOINT INSTANCE DIRECTORY. It answers each line with a line.

    store SEED        computes the KV of a prompt and stores it: "ok", or why not
    load SEED         looks a prompt up, and loads it into other blocks: the same
    begin_store SEED  begins it and answers "begun"; `end` waits for the outcome. The same for begin_load
    end

After each transfer every byte of the memory is compared with what it must be; any other is "WRONG". A load that failed
may have left anything in the blocks that it loads into. `OpenclRig` holds this process's copies for a test.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt
import pyopencl as cl
from kvframework.api.futures import Future
from kvframework.api.transport import LoadOutcome, StoreOutcome
from kvframework.client import KVClient, RequestHashes, WorkerAdapter
from opencl_rig import OpenclRig

from kvf_opencl.device import svm
from kvf_opencl.runtime import runtime

SHAPE = (2, 2, 64, 16, 4, 8)  # layers, K and V, blocks, tokens of a block, heads, dim
TOKENS = 512
PATIENCE_S = 60.0


class Engine:
    def __init__(self, endpoint: str, instance: int, directory: str) -> None:
        self.rig = OpenclRig(directory)
        self.memory = runtime("").empty(SHAPE, "float16")
        self.image = np.zeros(SHAPE, np.uint16)
        self.source, self.target = np.random.default_rng(instance).permutation(64).reshape(2, 32).tolist()
        self.client = KVClient(endpoint, deadline_scale=20.0)
        assert self.client.wait_up(PATIENCE_S), "no server"
        self.worker = WorkerAdapter(
            self.client,
            instance_id=instance,
            model_name="model",
            transport="opencl",
            layout_options={"axes": ["plane", "block", "token", "head", "dim"]},
        )
        layers = {f"layer.{index}": self.memory.select(0, index) for index in range(2)}
        self.write()
        self.worker.register_kv_caches(layers, block_size=16)
        self.scheduler = self.worker.scheduler()

    def begin_store(self, seed: int) -> str:
        self.image[:, :, self.source] = content(seed)
        self.write()
        self.request = self.hashes(seed)
        self.loading: int | None = None
        self.future: Future[StoreOutcome] | Future[LoadOutcome] = self.worker.submit_store(
            self.request, 0, TOKENS, [self.source], event=None
        )
        return "begun"

    def begin_load(self, seed: int) -> str:
        self.request, self.loading = self.hashes(seed), seed
        *_, found = self.scheduler.arrivals(self.scheduler.lookup(self.request), PATIENCE_S)
        if found.hit_tokens < TOKENS:
            self.future = Future.resolved(LoadOutcome(False, f"{found.hit_tokens} tokens are there"))
        else:
            self.future = self.worker.submit_retrieve(self.request, 0, TOKENS, [self.target], event=None)
        return "begun"

    def end(self) -> str:
        outcome = self.future.result(PATIENCE_S)
        self.scheduler.end_request(self.request.request_id)
        memory = np.frombuffer(self.rig.read(self.memory), np.uint16).reshape(SHAPE)
        if self.loading is not None:
            self.image[:, :, self.target] = content(self.loading) if outcome else memory[:, :, self.target]
        if not np.array_equal(memory, self.image):
            return "WRONG"
        return "ok" if outcome else repr(outcome)

    def store(self, seed: int) -> str:
        self.begin_store(seed)
        return self.end()

    def load(self, seed: int) -> str:
        self.begin_load(seed)
        return self.end()

    def write(self) -> None:
        """As kernels write it: in the thread's current queue, behind which a store without an event comes."""
        queue = runtime("").current(self.memory.device)
        cl.enqueue_copy(queue, svm(self.memory.address, self.memory.nbytes), cl.SVM(self.image), is_blocking=False)
        queue.flush()

    def hashes(self, seed: int) -> RequestHashes:
        request = RequestHashes(self.client.hasher, self.client.chunk_size, request_id=f"r{seed}")
        request.extend(range(seed * 1000, seed * 1000 + TOKENS))
        return request


def content(seed: int) -> npt.NDArray[np.uint16]:
    """The KV of a prompt."""
    layers, planes, _, *rest = SHAPE
    return np.random.default_rng(seed).integers(0, 1 << 16, (layers, planes, TOKENS // 16, *rest), np.uint16)


def main() -> None:
    endpoint, instance, directory = sys.argv[1:]
    engine = Engine(endpoint, int(instance), directory)
    for line in sys.stdin:
        name, *seed = line.split()
        print(getattr(engine, name)(*map(int, seed)), flush=True)
    engine.worker.close()
    engine.client.close()
    engine.rig.close()


if __name__ == "__main__":
    main()
