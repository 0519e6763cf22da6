"""A client process that frees nothing: it fills L1 with its prompts, a chunk each, then does what each line says.

Arguments: endpoint, number of prompts, the first token. A line is `look` or `load`; how many prompts were
hits or loads goes out.
"""

from __future__ import annotations

import sys

from tests.support.wire_client import WireClient, key_for


def main(endpoint: str, prompts: str, first: str) -> None:
    with WireClient(endpoint) as client:
        registered = client.register(1)
        keys = [key_for(registered, [int(first) + number] * 256) for number in range(int(prompts))]
        stored = sum(bool(client.store(key, b"h")) for key in keys)
        print(stored, flush=True)
        for line in sys.stdin:
            if line == "load\n":
                done = sum(client.prepare_retrieve(key).hit for key in keys)
            else:
                done = sum(client.lookup(key).hit_tokens == 256 for key in keys)
            print(done, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
