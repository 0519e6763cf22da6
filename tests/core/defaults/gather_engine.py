"""An engine with paged memory, its transport `cpu_gather`, and a double of the server behind it. Needs torch."""

from __future__ import annotations

import pytest

from kvf_cpu_gather.kernel import CopyKernel, load_kernel
from kvf_layouts.paged import PagedLayout
from kvframework.api.keys import CacheKey
from tests.support.engines import ArenaEngine
from tests.support.lazy import torch

BLOCK, CHUNK, HEADS, DIM, BLOCKS, LAYERS = 4, 8, 2, 3, 12, 2
NHD = ("plane", "block", "token", "head", "dim")
HND = ("plane", "block", "head", "token", "dim")
IDS = [[5, 2, 7, 8]]  # two chunks: scattered blocks, then neighbours


copying_by: list[CopyKernel | None] = [None]


@pytest.fixture(params=["torch", "native"], autouse=True)
def both_ways(request):
    """Every test of a module that imports this runs with and without the copy kernel."""
    kernel = load_kernel(2) if request.param == "native" else None
    if request.param == "native" and kernel is None:
        pytest.skip("the copy kernel was not built: no C compiler at build time")
    copying_by[0] = kernel
    yield
    copying_by[0] = None


def digest(index: int) -> bytes:
    return bytes([index]) * 32


def key(start: int = 0, end: int = 2 * CHUNK) -> CacheKey:
    digests = b"".join(digest(i) for i in range(end // CHUNK))
    return CacheKey("m", 1, 0, bytes(16), start, end, "r", digests=digests)


class Engine(ArenaEngine):
    def __init__(self, axes=NHD, dtype="float32", seed=1, link=None, kv=None, path="auto"):
        sizes = {"plane": 2, "block": BLOCKS, "token": BLOCK, "head": HEADS, "dim": DIM}
        generator = torch.Generator().manual_seed(seed)
        shape = [sizes[axis] for axis in axes]
        kv = kv or {f"l{i}": torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for i in range(LAYERS)}
        super().__init__(
            kv, PagedLayout(axes), block_size=BLOCK, chunk=CHUNK, link=link, path=path, kernel=copying_by[0]
        )

    def store(self, ids=IDS, cache_key=None, event=None):
        return self.transport.store(self.transfer(ids, cache_key or key(), storing=True, event=event))

    def load(self, ids=IDS, cache_key=None, skip=0, event=None):
        return self.transport.load(self.transfer(ids, cache_key or key(), storing=False, event=event), skip)

    def tokens(self, ids):
        """[planes, layers, tokens, heads, dim] of these blocks, as bytes-comparable integers."""
        return self.blocks()[:, :, ids].flatten(2, 3)
