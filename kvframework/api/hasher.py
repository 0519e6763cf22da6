"""The `KeyHasher` contract: chunk digests of token ids. Pure; servers and engines use the same hasher."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvframework.api.keys import DIGEST_BYTES, TOKEN_BYTES
from kvframework.api.plugin import Buffer, O, Provider, hookimpl

__all__ = ["DIGEST_BYTES", "TOKEN_BYTES", "Buffer", "HasherProvider", "KeyHasher", "hookimpl"]


class KeyHasher(ABC):
    """A hash of tokens into chained 32-byte digests: a chunk's digest names the whole prefix up to its end.
    `fingerprint` names algorithm, seed and version; engines and server compare it in HELLO."""

    name: str
    fingerprint: str

    @abstractmethod
    def chunk_digests(
        self, tokens: Buffer, chunk_tokens: int, *, parent: bytes = b"", extras: Mapping[int, bytes] | None = None
    ) -> bytes:
        """Return packed 32-byte digests of all whole chunks of `tokens` (packed little-endian u32); the rest is
        ignored. `parent` is the digest of the chunk before the first (b"" at the start of a request). `extras` maps a
        chunk's index within this call to bytes folded in there (LoRA, multimodal and embedding digests); those of no
        whole chunk are ignored. Blocking, CPU only; several threads call at once; keeps no reference to `tokens`."""


@dataclass(frozen=True, kw_only=True)
class HasherProvider(Provider[O]):
    """A key hasher. `create` makes it: in the server, and in every client by the name that the server sends."""

    kind = "hasher"
    create: Callable[[O], KeyHasher]
