"""An engine process that loads a prompt and is held up in the middle of it. After a failed load it does what engines
do: it computes the blocks that its adapter names.

Arguments: endpoint and path ("arena" or "wire"). It says "copying" with its pins in hand, goes on after a line, and
says in one JSON line what came of it.
"""

from __future__ import annotations

import json
import sys

import torch

from kvframework.client import KVClient
from tests.support.engines import PagedEngine

TOKENS = list(range(1024))
BLOCKS = list(range(64))
WIDE = 256  # objects of 1 MiB
COMPUTED = 3.0


class Held:
    """An engine's event that comes when the test says so."""

    def synchronize(self) -> None:
        print("copying", flush=True)
        sys.stdin.readline()


def main(endpoint: str, path: str) -> None:
    with KVClient(endpoint, deadline_scale=20.0, connect_timeout_s=30.0) as client:
        engine = PagedEngine(client, 50, path=path, wide=WIDE)
        request = engine.request(TOKENS)
        submit = engine.worker.submit_retrieve
        loaded = submit(request, 0, len(TOKENS), [BLOCKS], event=Held()).result(20).ok  # type: ignore[arg-type]
        finished = engine.worker.get_finished()
        (failed,) = engine.worker.take_failed_blocks()
        for tensor in engine.kv.values():
            tensor[:, sorted(failed)] = COMPUTED
        right = bool((engine.tokens(BLOCKS) == COMPUTED).all())
        stored = engine.store(engine.request(TOKENS, "again"), BLOCKS)
        told = {"loaded": loaded, "finished": sorted(finished[1]), "failed": sorted(failed)}
        print(json.dumps({**told, "right": right, "stored": stored}), flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
