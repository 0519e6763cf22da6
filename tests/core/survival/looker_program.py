"""A scheduler process: a token a line comes in, how many tokens of its prompt are a hit goes out, at once.

Arguments: endpoint, namespace (hex), tokens of a prompt.
"""

from __future__ import annotations

import sys

from kvframework.client import KVClient, RequestHashes, SchedulerAdapter


def main(endpoint: str, namespace: str, length: str) -> None:
    with KVClient(endpoint, deadline_scale=20.0, connect_timeout_s=30.0) as client:
        chunk = client.chunk_size
        scheduler = SchedulerAdapter(client, model_name="m", namespace=bytes.fromhex(namespace), chunk_tokens=chunk)
        print("ready", flush=True)
        for line in sys.stdin:
            request = RequestHashes(client.hasher, chunk, request_id="looker")
            request.extend([int(line)] * int(length))
            result = scheduler.lookup(request)
            print(result.hit_tokens, flush=True)
            scheduler.free(result)


if __name__ == "__main__":
    main(*sys.argv[1:])
