"""Prompts that overlap, and the KV of their chunks: both follow from numbers, so that any process can check any byte.
Pure."""

from __future__ import annotations

import array
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvf_hashers.sha256 import Sha256
from kvframework.api.keys import DIGEST_BYTES, ObjectKey

CHUNK_TOKENS = 256
# No power of two divides it, so bytes that were moved by a page or a cache line are wrong ones.
_PERIOD = 4099


@dataclass(frozen=True)
class Prompt:
    """Names the prefix up to each of its chunks."""

    digests: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.digests)


def prompt(segments: Sequence[int]) -> Prompt:
    """One chunk for each of `segments`; prompts that begin with the same ones share those chunks."""
    tokens = array.array("I", [segment for segment in segments for _ in range(CHUNK_TOKENS)])
    packed = Sha256().chunk_digests(tokens.tobytes(), CHUNK_TOKENS)
    return Prompt(tuple(packed[at : at + DIGEST_BYTES] for at in range(0, len(packed), DIGEST_BYTES)))


def overlapping(seed: int, count: int = 120, longest: int = 12) -> list[Prompt]:
    """Prompts of up to `longest` chunks, most of which begin like another one; some 420 to 550 chunks in all."""
    chance = random.Random(f"{seed}/prompts")
    paths: list[list[int]] = [[]]
    for number in range(count):
        shared = chance.choice(paths)[: chance.randint(0, longest - 1)]
        own = chance.randint(1, longest - len(shared))
        paths.append([*shared, *range(number * longest, number * longest + own)])
    return [prompt(path) for path in paths[1:]]


def content(digest: bytes, nbytes: int) -> bytes:
    period = hashlib.shake_128(digest).digest(_PERIOD)
    return (period * (nbytes // _PERIOD + 1))[:nbytes]


def object_key(namespace: bytes, digest: bytes) -> bytes:
    """The packed key of rank 0, without a salt."""
    return ObjectKey(namespace, bytes(16), 0, 0, digest).pack()
