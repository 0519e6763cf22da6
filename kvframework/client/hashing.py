"""The digests of one request: every token is hashed once, however often the request is looked up and stored."""

from __future__ import annotations

import array
import sys
from collections.abc import Mapping, Sequence

from kvframework.api.content import ChunkContent, Extra, Image
from kvframework.api.hasher import DIGEST_BYTES, TOKEN_BYTES, KeyHasher
from kvframework.api.retain import Retain
from kvframework.api.trace import sampled_parent
from kvframework.api.transfer import LoadGrant
from kvframework.client.grants import Grants
from kvframework.client.token_ids import packed_behind
from kvframework.errors import BadRange, RequestError


class RequestHashes:
    """Chained chunk digests of one request's tokens, extended as tokens arrive. For one thread at a time.

    `digests` are those of its first whole chunks, if another process has made them: with their extras. `trace` is the
    request's `traceparent` header: if it says that the request is sampled, the server's part gets spans. `retain` says
    for how long its KV is of use (`kvframework.api.retain.retain_of`), with every lookup, store and load of it.

    With `keep_tokens`, for a server that wants them (`KVClient.wants_tokens`), the tokens stay here, 4 bytes each, and
    go along with stores and loads, so that routers learn of them. `lora_name` is the adapter's name to routers.

    `grants` are what the last lookup has prepared for loads, in this process or another, see
    `LookupResult.take_grants`.
    """

    def __init__(
        self,
        hasher: KeyHasher,
        chunk_tokens: int,
        *,
        request_id: str,
        cache_salt: str = "",
        digests: bytes = b"",
        trace: str = "",
        retain: Sequence[Retain] = (),
        keep_tokens: bool = False,
        lora_name: str = "",
        grants: Sequence[LoadGrant] = (),
    ) -> None:
        self.grants = Grants(grants)
        self.request_id = request_id
        self.cache_salt = cache_salt
        self.trace = sampled_parent(trace) if trace else ""
        self.retain = tuple(retain)
        self.chunk_tokens = chunk_tokens
        self._hasher = hasher
        self._digests = bytearray(digests)
        self._rest = array.array("I")
        self._made_elsewhere = len(digests) // DIGEST_BYTES
        self._lora_name = lora_name
        self._kept = array.array("I") if keep_tokens and not digests else None
        self._contents: dict[tuple[int, int], ChunkContent] = {}
        # The bytes folded in, by chunk; also those of chunks that are not whole yet.
        self._extras: dict[int, bytes] = {}

    @property
    def hashed_tokens(self) -> int:
        """The number of tokens in whole chunks so far."""
        return len(self._digests) // DIGEST_BYTES * self.chunk_tokens

    @property
    def tokens(self) -> int:
        """The number of tokens so far."""
        return self.hashed_tokens + len(self._rest)

    def extend(self, token_ids: Sequence[int], extras: Mapping[int, bytes] | None = None) -> None:
        """Append tokens. `extras` maps chunk indices of the request to bytes folded in there (LoRA, multimodal and
        embedding digests).

        An extra must be given before its chunk's last token, or with it; it is kept until then, and may be repeated,
        also later and for chunks that another process has hashed. An error changes nothing: `RequestError` for an extra
        that is too late, differs from the one its chunk already has, or belongs to no chunk; `OverflowError` for an id
        that is no u32; any error of the hasher.
        """
        added = self._checked(extras or {})
        tokens = packed_behind(self._rest, token_ids)
        whole = len(tokens) // self.chunk_tokens * self.chunk_tokens
        if whole:
            self._digests += self._hashed(tokens, whole, {**self._extras, **added})
        self._extras.update(added)
        if self._kept is not None:
            self._kept += tokens[len(self._rest) :]
        self._rest = tokens[whole:]

    def digests(self, end: int) -> bytes:
        """Return the packed digests of the chunks before `end` tokens. Raises `BadRange` if `end` is no boundary or not
        hashed."""
        if end % self.chunk_tokens or not 0 <= end <= self.hashed_tokens:
            raise BadRange(
                f"end is {end}",
                where=f"request {self.request_id!r}",
                available=f"a multiple of {self.chunk_tokens}, at most the {self.hashed_tokens} tokens that are hashed",
            )
        return bytes(self._digests[: end // self.chunk_tokens * DIGEST_BYTES])

    def content(
        self, start: int, end: int, *, block_size: int = 0, hashes: bytes = b"", images: Sequence[Image] = ()
    ) -> ChunkContent | None:
        """Return the content of tokens `[start, end)`, whole chunks, for the server; None if its tokens are not kept.
        For `block_size`, `hashes` and `images` see `ChunkContent`."""
        if self._kept is None:
            return self._contents.get((start, end))
        tokens = self._kept[start:end]
        if len(tokens) < end - start:
            return None
        if sys.byteorder == "big":
            tokens.byteswap()
        here = range(start // self.chunk_tokens, end // self.chunk_tokens)
        extras = [Extra(index - here.start, extra) for index, extra in self._extras.items() if index in here]
        return ChunkContent(tokens.tobytes(), tuple(extras), block_size, hashes, tuple(images), self._lora_name)

    def bring(self, start: int, end: int, content: ChunkContent) -> None:
        """Keep the content of tokens `[start, end)` that another process has made, to go along with their store or
        load."""
        self._contents[start, end] = content

    def _checked(self, extras: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the extras that are new."""
        hashed = len(self._digests) // DIGEST_BYTES
        added = {}
        for index, extra in extras.items():
            if self._made_elsewhere <= index and extra != self._extras.get(index, b""):
                if index in self._extras:
                    raise RequestError(
                        f"two different extras for chunk {index}",
                        where=f"request {self.request_id}",
                        available="one a chunk",
                        hint="join what is folded into one chunk",
                    )
                if index < hashed:
                    raise RequestError(
                        f"an extra for chunk {index}, which is hashed without it",
                        where=f"request {self.request_id}",
                        available=f"chunk {hashed} or later",
                        hint="give extras before their chunk's last token",
                    )
                added[index] = bytes(extra)
            elif index < 0:
                raise RequestError(f"an extra for chunk {index}", available="0 or more, counted from the first chunk")
        return added

    def _hashed(self, tokens: array.array[int], whole: int, extras: Mapping[int, bytes]) -> bytes:
        """Return the digests of the first `whole` tokens."""
        done = len(self._digests) // DIGEST_BYTES
        here = range(done, done + whole // self.chunk_tokens)
        folded = {index - done: extra for index, extra in extras.items() if index in here}
        if sys.byteorder == "big":
            tokens = tokens[:]
            tokens.byteswap()
        parent = bytes(self._digests[-DIGEST_BYTES:])
        packed = memoryview(tokens).cast("B")[: whole * TOKEN_BYTES]
        return self._hasher.chunk_digests(packed, self.chunk_tokens, parent=parent, extras=folded)
