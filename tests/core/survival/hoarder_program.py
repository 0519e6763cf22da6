"""A client process that frees nothing: it fills L1 with its prompts, a chunk each, then does what each line says.

Arguments: endpoint, number of prompts, the first token. A line is `look`, `load`, or `grant ID` (for the instance of
another client); how many prompts were hits, loads or grants goes out.
"""

from __future__ import annotations

import sys

import msgspec

from kvframework.wire import messages as m
from tests.support.wire_client import WireClient, key_for


def main(endpoint: str, prompts: str, first: str) -> None:
    with WireClient(endpoint) as client:
        registered = client.register(1)
        keys = [key_for(registered, [int(first) + number] * 256) for number in range(int(prompts))]
        stored = sum(bool(client.store(key, b"h")) for key in keys)
        print(stored, flush=True)
        for line in sys.stdin:
            what, *instances = line.split()
            done = 0
            for key in keys:
                if what == "load":
                    done += client.prepare_retrieve(key).hit
                else:
                    grant = tuple(map(int, instances))
                    asked = m.Lookup(msgspec.structs.replace(key, worker_id=None), grant=grant)
                    reply = client.call("LOOKUP", asked)
                    done += len(reply.grants) if grant else reply.hit_tokens == 256
            print(done, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
