"""An engine's paged KV memory, and the correct content of every chunk in it. Needs torch.

The KV of a chunk is a pure function of its namespace, its digest (which names all tokens up to its end) and the place
within it, so that any engine that loads a byte can check it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

LAYERS, PLANES, BLOCK, HEADS, DIM = 2, 2, 16, 2, 16
AXES = ["plane", "block", "token", "head", "dim"]
CHUNK = 256
PER_CHUNK = CHUNK // BLOCK
BLOCKS = 16 * PER_CHUNK
OBJECT_BYTES = PLANES * LAYERS * CHUNK * HEADS * DIM * 4
_POISON = -0x21524111


def content(namespace: bytes, digest: bytes) -> torch.Tensor:
    """Return the KV of a chunk: [planes, layers, tokens, heads, dim], int32."""
    seed = hashlib.blake2b(namespace + digest, digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "little"))
    shape = (PLANES, LAYERS, CHUNK, HEADS, DIM)
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32, generator=generator)


class PagedMemory:
    """Paged KV memory. `kv_caches` are float32 for the cache; the checks compare the same bits as integers."""

    def __init__(self) -> None:
        self._bits = torch.full((LAYERS, PLANES, BLOCKS, BLOCK, HEADS, DIM), _POISON, dtype=torch.int32)
        self._computed = self._bits
        self.kv_caches = {f"layer{index}": self._bits[index].view(torch.float32) for index in range(LAYERS)}

    def poison(self) -> None:
        """Fill the memory with a pattern that is no KV."""
        self._bits.fill_(_POISON)

    def compute(self, namespace: bytes, digests: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Fill `blocks` with the KV of these chunks, and all other blocks with poison."""
        self._computed = self._expected(namespace, digests, blocks, 0)
        self._bits.copy_(self._computed)

    def changed(self) -> bool:
        """Whether any word differs from what `compute` left."""
        return not torch.equal(self._bits, self._computed)

    def wrong_bytes(
        self, namespace: bytes, digests: Sequence[bytes], blocks: Sequence[int], skipped_tokens: int = 0
    ) -> str:
        """Describe how the memory differs from these chunks in these blocks and poison elsewhere; "" if it does not."""
        expected = self._expected(namespace, digests, blocks, skipped_tokens)
        if torch.equal(self._bits, expected):
            return ""
        layer, plane, block, token, *_ = (self._bits != expected).nonzero()[0].tolist()
        place = list(blocks).index(block) if block in blocks else -1
        count = int((self._bits != expected).sum())
        found = "poison" if int(self._bits[layer, plane, block, token].flatten()[0]) == _POISON else "another value"
        return (
            f"{count} of {len(digests) * OBJECT_BYTES // 4} words, the first in layer {layer}, plane {plane}, block "
            f"{block} (chunk {place // PER_CHUNK if place >= 0 else 'of nobody'}), token {token}: {found}"
        )

    def stray_bytes(self, blocks: Sequence[int]) -> str:
        """Report a write outside of `blocks` since `poison`; "" for none."""
        others = torch.ones(BLOCKS, dtype=torch.bool)
        others[list(blocks)] = False
        return "" if bool((self._bits[:, :, others] == _POISON).all()) else "blocks that a load does not name"

    def _expected(
        self, namespace: bytes, digests: Sequence[bytes], blocks: Sequence[int], skipped_tokens: int
    ) -> torch.Tensor:
        expected = torch.full_like(self._bits, _POISON)
        if digests:
            tokens = torch.cat([content(namespace, digest) for digest in digests], dim=2)
            tokens[:, :, :skipped_tokens] = _POISON
            paged = tokens.view(PLANES, LAYERS, len(digests) * PER_CHUNK, BLOCK, HEADS, DIM)
            expected[:, :, list(blocks)] = paged.transpose(0, 1)
        return expected
