"""Stores the KV of one request and loads it into other blocks, as an engine does: ENDPOINT NODE."""

import sys

import kvf_simdev

from kvf_dev.testing.accelerator import DeviceTensor
from kvframework.client import KVClient, RequestHashes, WorkerAdapter

endpoint, node = sys.argv[1:]
runtime = kvf_simdev.runtime(node)
shape = (2, 64, 16, 4, 8)  # K and V, blocks, tokens of a block, heads, dim
caches = {f"layer.{n}": DeviceTensor.empty(runtime, runtime.devices[0], shape, "float16") for n in range(2)}
first, second = (caches["layer.0"].select(0, 1).narrow(0, at, 32) for at in (0, 32))  # of V
first.fill(bytes(range(256)) * (32 * 16 * 4 * 8 * 2 // 256))
group = {"layers": ["layer.*"], "axes": ["plane", "block", "token", "head", "dim"], "block_size": 16}

with KVClient(endpoint) as client:
    assert client.wait_up(10.0), "no server"
    worker = WorkerAdapter(
        client,
        instance_id=1,
        model_name="demo",
        transport="simdev",
        transport_options={"node": node},
        layout="paged",
        layout_options={"groups": [group]},
    )
    worker.register_kv_caches(caches, block_size=16)
    request = RequestHashes(client.hasher, client.chunk_size, request_id="r1")
    request.extend(range(512))
    # `event` may be your own, behind the work that fills the blocks; None: behind the current stream.
    stored = worker.submit_store(request, 0, 512, [list(range(32))], event=None)
    print("stored", stored.result(10.0).ok)
    loaded = worker.submit_retrieve(request, 0, 512, [list(range(32, 64))], event=None)
    print("loaded", loaded.result(10.0).ok, second.content() == first.content())
    worker.close()
