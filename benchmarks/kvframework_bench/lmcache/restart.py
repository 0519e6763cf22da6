"""The command `python -m kvframework_bench.lmcache.restart`: what LMCache's server finds of a stored prompt after a
clean end and after kill -9, as a line of JSON each, beside `kvframework bench restart`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

from kvframework_bench.engine import PagedMemory
from kvframework_bench.lmcache_server import prepare, running_lmcache
from kvframework_bench.process import await_end, scratch
from kvframework_bench.workload import BLOCK_TOKENS, SHAPES

_SHAPE = SHAPES["12kb"].quick()
_MODEL = "restart"


class Restarted(NamedTuple):
    """`tokens` of the `stored` ones that the next server finds; `first_answer_s` from the end on, in seconds."""

    end: str
    stored: int
    tokens: int
    first_answer_s: float


def restarted(end: signal.Signals, directory: Path) -> Restarted:
    """Store a prompt, send the signal, start the next server and ask it. Raises `BenchFailed`."""
    from kvframework_bench.lmcache.peer import Peer

    memory = PagedMemory(_SHAPE, shuffled=False)

    def instance(endpoint: str) -> Peer:
        tokens = range(_SHAPE.tokens)
        return Peer(endpoint, memory.kv, model=_MODEL, block_tokens=BLOCK_TOKENS, tokens=tokens)

    with running_lmcache(directory, shared=True) as server:
        first = instance(server.endpoint)
        first.store(memory.source)
        began = time.perf_counter()
        os.kill(server.child.pid, end)
        await_end(server.child)
    with running_lmcache(directory, shared=True) as server:
        found = instance(server.endpoint).found(_SHAPE.tokens)
        return Restarted(end.name, _SHAPE.tokens, found, time.perf_counter() - began)


def main() -> int:
    prepare()
    for end in (signal.SIGINT, signal.SIGKILL):
        with scratch() as directory:
            sys.stdout.write(json.dumps(restarted(end, directory)._asdict()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
