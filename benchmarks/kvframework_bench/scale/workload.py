"""The sizes of `kvframework bench scale`, and its prompts: numbers from which digests and contents follow. Pure.

Nothing is hashed that a model would see: a server takes any digests for those of chunks, and does the same with them.
"""

from __future__ import annotations

import hashlib

import msgspec

from kvframework.api.keys import DIGEST_BYTES, CacheKey
from kvframework.storage.l1.entries import ALIGNMENT
from kvframework.wire import messages as m

# Chunks of one request: as many as 8k tokens have in a server's default chunks.
CHUNKS = 32
CHUNK_TOKENS = 16

# Besides its range in the arena, an object costs its server some tables; a client is a Python process.
_TABLE_BYTES = 1500
_CLIENT_BYTES = 50 << 20


class Sizes(msgspec.Struct, frozen=True):
    """`clients` and `objects` are the steps, ascending; `base_objects` those of the steps of clients, with
    `spare_bytes` of arena for their stores. Each sample takes `seconds`. Objects come in whole prompts of `CHUNKS`."""

    clients: tuple[int, ...]
    objects: tuple[int, ...]
    base_objects: int
    spare_bytes: int
    rounds: int
    seconds: float

    def upto(self, clients: int, objects: int) -> Sizes:
        """Return the steps that are not beyond these; at least the first one of each."""
        return msgspec.structs.replace(
            self,
            clients=tuple(step for step in self.clients if step <= clients) or self.clients[:1],
            objects=tuple(step for step in self.objects if step <= objects) or self.objects[:1],
        )

    @property
    def base_bytes(self) -> int:
        """The arena of the steps of clients."""
        return self.base_objects * ALIGNMENT + self.spare_bytes


FULL = Sizes(
    clients=(1, 2, 4, 8, 16, 32, 64),
    objects=(1 << 10, 10 << 10, 100 << 10, 1 << 20),
    base_objects=10 << 10,
    spare_bytes=1 << 30,
    rounds=7,
    seconds=0.25,
)
QUICK = Sizes(clients=(1, 3), objects=(256, 1024), base_objects=256, spare_bytes=64 << 20, rounds=2, seconds=0.05)


def fitting(sizes: Sizes, available_bytes: int) -> tuple[Sizes, list[str]]:
    """Return the sizes that fit into memory, and a line for each step that does not. The servers of all steps of
    objects run at once."""
    objects, clients = list(sizes.objects), list(sizes.clients)
    skipped = []
    while len(objects) > 1 and sum(objects) * (ALIGNMENT + _TABLE_BYTES) > available_bytes:
        skipped.append(
            f"{objects.pop():,} objects do not fit into {available_bytes / (1 << 30):.1f} GiB of available memory"
        )
    while len(clients) > 1 and sizes.base_bytes + clients[-1] * _CLIENT_BYTES > available_bytes:
        skipped.append(
            f"{clients.pop()} clients do not fit into {available_bytes / (1 << 30):.1f} GiB of available memory"
        )
    return msgspec.structs.replace(sizes, objects=tuple(objects), clients=tuple(clients)), skipped


MODEL = "bench scale"


def shape(instance_id: int) -> m.RegisterNonGpuContextPayload:
    """Return a shape with objects of 1 KiB: less than the arena's alignment, so that as many as possible fit."""
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
    """Return the bytes of each object: its digest repeated, so that no object can be taken for another one."""
    return [digests[at : at + DIGEST_BYTES] * (nbytes // DIGEST_BYTES) for at in range(0, len(digests), DIGEST_BYTES)]
