"""The requests of `kvframework bench policy`: those of a trace, or made ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvf_plan.simulation.chunks import Chunks
from kvf_plan.trace.reading import open_trace

_SYSTEM_PROMPTS = 2000


class Request(NamedTuple):
    """`at` in seconds; `digests` are the chunks of the prompt, as in object keys."""

    at: float
    digests: list[bytes]


def from_trace(path: Path) -> list[Request]:
    """Read a trace; its last chunks count as whole. Raises `TraceError`."""
    trace = open_trace(path)
    size = trace.header.chunk_tokens
    chunks = Chunks(size, size, whole=False)
    return [Request(request.at, chunks.digests(request)) for request in trace]


def made(blocks: int, seed: int) -> list[Request]:
    """Make requests of about so many blocks: conversations that go on, on system prompts of Zipf popularity, some of
    which come back at once and some late."""
    chance = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(_SYSTEM_PROMPTS)]
    fresh = _numbers()
    prompts = [[next(fresh) for _ in range(1 + rank % 12)] for rank in range(_SYSTEM_PROMPTS)]
    open_ones: list[list[bytes]] = []
    requests: list[Request] = []
    total = 0
    while total < blocks:
        if open_ones and chance.random() < 0.45:
            before = open_ones.pop(chance.randrange(len(open_ones)))
        else:
            before = chance.choices(prompts, weights)[0]
        digests = [*before, *(next(fresh) for _ in range(chance.randint(1, 20)))]
        open_ones.append(digests)
        if len(open_ones) > 1500:
            del open_ones[:100]
        total += len(digests)
        requests.append(Request(len(requests) * 0.3, digests))
    return requests


def _numbers() -> Iterator[bytes]:
    number = 0
    while True:
        yield number.to_bytes(32, "big")
        number += 1
