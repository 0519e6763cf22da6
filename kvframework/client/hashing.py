"""Owns the digests of one request: every token is hashed once, however often the request is looked up and stored."""

from __future__ import annotations

import array
import sys
from collections.abc import Mapping, Sequence

from kvframework.api import DIGEST_BYTES, KeyHasher


class RequestHashes:
    """Chained chunk digests of one request's tokens, grown as tokens come. For one thread at a time.

    `digests` are those of its first whole chunks, if another process has made them.
    """

    def __init__(
        self, hasher: KeyHasher, chunk_tokens: int, *, request_id: str, cache_salt: str = "", digests: bytes = b""
    ) -> None:
        self.request_id = request_id
        self.cache_salt = cache_salt
        self.chunk_tokens = chunk_tokens
        self._hasher = hasher
        self._digests = bytearray(digests)
        self._rest = array.array("I")

    @property
    def hashed_tokens(self) -> int:
        """Tokens in whole chunks, so far."""
        return len(self._digests) // DIGEST_BYTES * self.chunk_tokens

    def extend(self, token_ids: Sequence[int], extras: Mapping[int, bytes] | None = None) -> None:
        """Adds tokens. `extras` maps chunk indices of the request to bytes folded in there (LoRA, multimodal and
        embedding digests); each is given with the tokens that end its chunk. Raises `OverflowError`
        for an id that is no u32."""
        # Lists are packed three times as fast as other sequences.
        self._rest.fromlist(token_ids if isinstance(token_ids, list) else list(token_ids))
        whole = len(self._rest) // self.chunk_tokens * self.chunk_tokens
        if not whole:
            return
        done = len(self._digests) // DIGEST_BYTES
        ready = self._rest[:whole]
        del self._rest[:whole]
        if sys.byteorder == "big":
            ready.byteswap()
        here = {index - done: extra for index, extra in (extras or {}).items() if index >= done}
        parent = bytes(self._digests[-DIGEST_BYTES:])
        self._digests += self._hasher.chunk_digests(ready.tobytes(), self.chunk_tokens, parent=parent, extras=here)

    def digests(self, end: int) -> bytes:
        """Packed digests of the chunks before `end` tokens. Raises `ValueError` if `end` is no boundary or not
        hashed."""
        if end % self.chunk_tokens or not 0 <= end <= self.hashed_tokens:
            raise ValueError(f"end {end} is no multiple of {self.chunk_tokens} up to {self.hashed_tokens}")
        return bytes(self._digests[: end // self.chunk_tokens * DIGEST_BYTES])
