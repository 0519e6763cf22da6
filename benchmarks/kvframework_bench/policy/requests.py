"""The requests of `kvframework bench policy`: a trace of Mooncake's form, or made ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvframework_bench.errors import BenchFailed

_FORM = "a JSON object with `timestamp` in ms and `hash_ids`, integers from 0 on, on each line, in the order of time"
_SYSTEM_PROMPTS = 2000


class Request(NamedTuple):
    """`at` in seconds; `digests` are the chunks of the prompt, as in object keys."""

    at: float
    digests: list[bytes]


def from_trace(path: Path) -> list[Request]:
    """Read a trace as Mooncake has released them. Raises `BenchFailed`, also for a file that cannot be read."""
    requests: list[Request] = []
    known: dict[int, bytes] = {}
    at = 0.0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                at, blocks = _parsed(line, at, f"{path.name}:{number}")
                requests.append(Request(at, [known.setdefault(block, block.to_bytes(32, "big")) for block in blocks]))
    except OSError as error:
        raise BenchFailed(f"{error.strerror}: {path}", where="--trace", hint="name a file") from None
    if not requests:
        raise BenchFailed(f"{path.name} is empty", where="--trace", hint=f"expected {_FORM}")
    return requests


def _parsed(line: bytes, before: float, where: str) -> tuple[float, list[int]]:
    try:
        read = json.loads(line)
        at, blocks = float(read["timestamp"]) / 1000, read["hash_ids"]
        good = before <= at < 1e12 and blocks and all(type(block) is int and 0 <= block < 1 << 128 for block in blocks)
    except (ValueError, TypeError, KeyError):
        good = False
    if not good:
        raise BenchFailed(f"line {where} is no request that follows the one before", where="--trace", hint=_FORM)
    return at, blocks


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
