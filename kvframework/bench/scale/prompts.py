"""Owns the prompts of `bench scale`: numbers that name them, the digests and contents that follow from a number. Pure.

Nothing is hashed that a model would see: a server takes any digests for those of chunks, and does the same with them.
"""

from __future__ import annotations

import hashlib

from kvframework.api import CacheKey
from kvframework.api.keys import DIGEST_BYTES
from kvframework.bench.scale.sizes import CHUNK_TOKENS
from kvframework.wire import messages as m

MODEL = "bench scale"


def shape(instance_id: int) -> m.RegisterNonGpuContextPayload:
    """Objects of 1 KiB: less than the arena's alignment, so that as many as possible fit."""
    return m.RegisterNonGpuContextPayload(
        instance_id=instance_id,
        model_name=MODEL,
        world_size=1,
        block_size=CHUNK_TOKENS,
        num_layers=1,
        hidden_dim_size=16,
        dtype_str="bfloat16",
        use_mla=False,
    )


class Prompts:
    """All prompts of a seed, each of `chunks` chunks."""

    def __init__(self, seed: int, chunks: int, namespace: bytes) -> None:
        self.chunks = chunks
        self.tokens = chunks * CHUNK_TOKENS
        self._seed = seed
        self._namespace = namespace

    def digests(self, number: int) -> bytes:
        return hashlib.shake_128(b"%d %d" % (self._seed, number)).digest(DIGEST_BYTES * self.chunks)

    def key(self, digests: bytes, *, rank: int | None) -> CacheKey:
        return CacheKey(
            model_name=MODEL,
            world_size=1,
            worker_id=rank,
            namespace=self._namespace,
            start=0,
            end=self.tokens,
            request_id="scale",
            digests=digests,
        )


def contents(digests: bytes, nbytes: int) -> list[bytes]:
    """The bytes of each object: its digest over and over, so that no object can be taken for another one."""
    return [digests[at : at + DIGEST_BYTES] * (nbytes // DIGEST_BYTES) for at in range(0, len(digests), DIGEST_BYTES)]
