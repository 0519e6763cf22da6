"""A context with flash attention loads the KV that one without it has stored, through a real server process."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kvf_llamacpp.layout import LlamaCppLayout

from kvframework.client import KVClient, RequestHashes, WorkerAdapter

LAYERS, CELLS, BLOCK, HEADS, DIM = 3, 64, 4, 2, 8
CHUNK = 16
PATIENCE_S = 30.0


@pytest.fixture
def client() -> Iterator[KVClient]:
    # Not below pytest's own folder: the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="kvf-") as folder:
        endpoint = f"ipc://{folder}/s.sock"
        settings = (f"server.endpoint={endpoint}", f"server.chunk_size={CHUNK}", "l1.capacity=1MiB")
        command = [str(Path(sys.executable).with_name("kvframework")), "serve", "--set", "layout.0.use=llamacpp"]
        for setting in settings:
            command += ["--set", setting]
        with subprocess.Popen(command) as server:
            try:
                with KVClient(endpoint, deadline_scale=20.0) as connected:
                    assert connected.wait_up(PATIENCE_S), "the server does not answer"
                    yield connected
            finally:
                server.terminate()


def context(*, v_trans: bool, seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    hidden = HEADS * DIM
    values = (hidden, CELLS) if v_trans else (CELLS, hidden)
    shapes = ((CELLS, hidden), values)
    return {
        f"l{at}": tuple(torch.randn(shape, generator=generator).half() for shape in shapes)  # type: ignore[misc]
        for at in range(LAYERS)
    }


def test_contexts_with_and_without_flash_attention_share_objects(client: KVClient) -> None:
    workers, caches = [], []
    for number, v_trans in enumerate((True, False)):
        options = {"head_dim": DIM, "v_trans": v_trans}
        worker = WorkerAdapter(
            client, instance_id=number, model_name="my.gguf", layout=LlamaCppLayout.name, layout_options=options
        )
        caches.append(context(v_trans=v_trans, seed=number))
        worker.register_kv_caches(caches[-1], block_size=BLOCK)
        workers.append(worker)
    request = RequestHashes(client.hasher, CHUNK, request_id="one")
    request.extend(range(2 * CHUNK))
    source, target = [7, 1, 2, 9, 4, 5, 0, 3], [8, 9, 10, 11, 12, 13, 14, 15]
    assert workers[0].submit_store(request, 0, 2 * CHUNK, [source]).result(PATIENCE_S).ok
    assert workers[1].submit_retrieve(request, 0, 2 * CHUNK, [target]).result(PATIENCE_S).ok
    for stored, loaded in zip(caches[0].values(), caches[1].values(), strict=True):
        for here, there in zip(source, target, strict=True):
            cells, found = slice(here * BLOCK, (here + 1) * BLOCK), slice(there * BLOCK, (there + 1) * BLOCK)
            assert torch.equal(stored[0][cells], loaded[0][found])
            assert torch.equal(stored[1][:, cells].T, loaded[1][found])
    for worker in workers:
        worker.close()
