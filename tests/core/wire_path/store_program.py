"""A worker process: registers over the wire, stores when it is told to, and says what came of it."""

from __future__ import annotations

import sys

import torch

from kvframework.client import KVClient
from tests.support.engines import PagedEngine


def main(endpoint: str, instance_id: str, fill: str, wide: str) -> None:
    with KVClient(endpoint, deadline_scale=20.0, connect_timeout_s=20.0) as client:
        engine = PagedEngine(client, int(instance_id), path="wire", wide=int(wide))
        for tensor in engine.kv.values():
            tensor.fill_(float(fill))
        print("ready", flush=True)
        sys.stdin.readline()
        stored = engine.store(engine.request(list(range(1024))), list(range(64)))
        print(stored, flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
