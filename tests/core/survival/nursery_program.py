"""Many client processes, made by fork from one that has imported everything: each looks the same prompt up, says "."
and lives on; "!" says that it could not.

Arguments: endpoint, namespace (hex), how many. Its line of output is their process ids, as JSON. It ends, with all of
them, when its standard input does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback

from kvframework.wire import messages as m
from tests.support.wire_client import WireClient, key_for

TOKENS = [5] * 1024


def look_up(endpoint: str, namespace: bytes) -> None:
    """In a child; never returns."""
    try:
        client = WireClient(endpoint, timeout=60.0)
        key = key_for(m.Registered(namespace, m.MemoryLayoutDesc(256, ())), TOKENS)
        assert client.lookup(key).hit_tokens == len(TOKENS)
        os.write(1, b".")
        while True:
            signal.pause()
    except Exception:  # noqa: BLE001 - the child ends here, whatever it was
        traceback.print_exc()
        os.write(1, b"!")
    finally:
        os._exit(1)


def main(endpoint: str, namespace: str, count: str) -> None:
    children = []
    for _ in range(int(count)):
        child = os.fork()
        if child == 0:
            look_up(endpoint, bytes.fromhex(namespace))
        children.append(child)
    os.write(1, json.dumps(children).encode() + b"\n")
    sys.stdin.read()
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
