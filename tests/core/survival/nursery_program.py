"""Many client processes, made by fork from one that has imported everything: each looks the same prompt up, says so and
lives on, as does the first. All are a process group of that one's id.

Arguments: endpoint, namespace (hex), how many.
"""

from __future__ import annotations

import os
import signal
import sys

from kvframework.wire import messages as m
from tests.support.wire_client import WireClient, key_for

TOKENS = [5] * 1024


def main(endpoint: str, namespace: str, count: str) -> None:
    os.setpgid(0, 0)
    for _ in range(int(count)):
        if os.fork() == 0:
            break
    else:
        signal.pause()
    word = b"was not served\n"
    try:
        client = WireClient(endpoint, timeout=60.0)
        key = key_for(m.Registered(bytes.fromhex(namespace), m.MemoryLayoutDesc(256, ())), TOKENS)
        assert client.lookup(key).hit_tokens == len(TOKENS)
        word = b"pins\n"
    finally:
        os.write(1, word)
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
