"""An engine in a container: `store` computes KV and stores it, `load` finds it, loads it into other blocks and compares
every byte with what was computed. Run by the image's interpreter; torch alone comes from a folder of the test's
environment, which stands last among the places of modules."""

from __future__ import annotations

import os
import sys
import time

sys.path.append("/torch")

import torch

import kvframework
from kvframework.client import KVClient, RequestHashes, WorkerAdapter

LAYERS, BLOCKS, BLOCK, HEADS, DIM = 4, 128, 16, 8, 64
PROMPT = [7 * position % 1000 for position in range(1024)]
OF_STORE, OF_LOAD = list(range(64)), [2 * block + 1 for block in range(64)]
LONG_S = 120.0


def computed() -> dict[str, torch.Tensor]:
    """KV with random bytes in every block, the same in each process."""
    torch.manual_seed(20)
    shape = (2, BLOCKS, BLOCK, HEADS, DIM)
    return {f"layer.{index}": torch.randint(-128, 127, shape, dtype=torch.int8) for index in range(LAYERS)}


def finished(worker: WorkerAdapter, request: RequestHashes) -> None:
    deadline = time.monotonic() + LONG_S
    while not any(request.request_id in some for some in worker.get_finished()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def main(task: str) -> None:
    assert kvframework.__file__.startswith("/opt/kvframework/"), kvframework.__file__
    kv = computed() if task == "store" else {name: torch.zeros_like(each) for name, each in computed().items()}
    with KVClient(name=task, connect_timeout_s=LONG_S, deadline_scale=20.0) as client:
        assert client.wait_up(LONG_S), client.raise_down()
        assert client.maps_arena
        worker = WorkerAdapter(
            client,
            instance_id=os.getpid() + (task == "load"),
            model_name="model",
            revision="1",
            layout_options={"axes": ["plane", "block", "token", "head", "dim"]},
        )
        registered = worker.register_kv_caches(kv, block_size=BLOCK)
        scheduler = worker.scheduler()
        request = RequestHashes(client.hasher, registered.desc.chunk_tokens, request_id=task)
        request.extend(PROMPT)
        if task == "store":
            future = worker.submit_store(request, 0, len(PROMPT), [OF_STORE])
            finished(worker, request)
            assert future.result().ok, future.result()
        else:
            found = scheduler.wait(scheduler.lookup(request, 0, len(PROMPT)), LONG_S)
            assert found.hit_tokens == len(PROMPT), found
            future = worker.submit_retrieve(request, 0, len(PROMPT), [OF_LOAD])
            finished(worker, request)
            assert future.result().ok, future.result()
            scheduler.free(found)
            for name, wanted in computed().items():
                assert torch.equal(kv[name][:, OF_LOAD], wanted[:, OF_STORE]), name
        scheduler.end_request(request.request_id)
        worker.close()
    print(f"{task} as uid {os.getuid()}: {len(PROMPT)} tokens")


if __name__ == "__main__":
    main(sys.argv[1])
