"""Owns the one way from a cache key to object keys, used by every path. Stateless: nothing is remembered of a
request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvframework.api import (
    DIGEST_BYTES,
    NAMESPACE_BYTES,
    TOKEN_BYTES,
    CacheKey,
    KeyHasher,
    MemoryLayoutDesc,
    PackedKey,
    key_prefix,
    salt_digest,
)
from kvframework.engine.hits import hit_chunks, needed_chunks, window_chunks
from kvframework.errors import BadRange, MessageTooLarge, NamespaceMismatch

MAX_WORLD_SIZE = 4096
MAX_OBJECTS = 1 << 15
MAX_TEXT = 1024
# Hashing more on the serving thread would keep other clients waiting.
MAX_RAW_TOKENS = 1 << 18


@dataclass(frozen=True)
class KeyGrid:
    """The objects of one request: chunks x ranks x layer groups. `flat` is chunk by chunk, in each rank by rank."""

    desc: MemoryLayoutDesc
    ranks: Sequence[int]
    chunks: int
    flat: Sequence[PackedKey]

    @property
    def row_count(self) -> int:
        return len(self.ranks) * len(self.desc.groups)

    def sized(self) -> list[tuple[PackedKey, int]]:
        """Each key with its object's bytes."""
        sizes = [group.nbytes for group in self.desc.groups] * len(self.ranks)
        return [(key, sizes[index % len(sizes)]) for index, key in enumerate(self.flat)]

    def by_row(self) -> dict[tuple[int, int], list[PackedKey]]:
        """The keys by (rank, layer group), each in the order of chunks."""
        groups = range(len(self.desc.groups))
        rows = [(rank, group) for rank in self.ranks for group in groups]
        return {row: list(self.flat[index :: len(rows)]) for index, row in enumerate(rows)}

    def hit(self, available: Sequence[bool]) -> int:
        """Usable chunks, given which objects of `flat` are there."""
        rows = self.row_count
        return hit_chunks([available[row::rows] for row in range(rows)], self._windows())

    def needed(self, chunks: int) -> list[int]:
        """Indices into `flat` of what a hit of `chunks` uses, in order."""
        rows = self.row_count
        spans = [needed_chunks(chunks, window) for window in self._windows()]
        return [chunk * rows + row for chunk in range(chunks) for row in range(rows) if chunk in spans[row]]

    def stored(self, first_chunks: Sequence[int]) -> list[int]:
        """Indices into `flat` of what a store writes, of one rank, without the first chunks of each layer group.

        Raises `BadRange` if a group of full attention, which needs every chunk, would lack any.
        """
        groups = self.desc.groups
        if len(first_chunks) not in (0, len(groups)):
            raise BadRange(f"{len(first_chunks)} counts", where="first_chunks", available=f"{len(groups)}, one a group")
        first = list(first_chunks) or [0] * len(groups)
        if any(
            not 0 <= count <= (self.chunks if group.window else 0) for count, group in zip(first, groups, strict=True)
        ):
            raise BadRange(
                f"first_chunks is {first}", where="first_chunks",
                available=f"0 for full attention, else 0 to {self.chunks}",
            )  # fmt: skip
        count = len(groups)
        return [index for index in range(len(self.flat)) if index // count >= first[index % count]]

    def _windows(self) -> list[int]:
        windows = [window_chunks(group.window, self.desc.chunk_tokens) for group in self.desc.groups]
        return windows * len(self.ranks)


class KeyResolver:
    """Thread-safe; holds only the hasher."""

    def __init__(self, hasher: KeyHasher) -> None:
        self._hasher = hasher

    def resolve(self, key: CacheKey, desc: MemoryLayoutDesc) -> KeyGrid:
        """The objects that `key` names, for its rank or, without one, for all.

        Raises `BadRange` if start, end, content and the chunk size do not fit each other, `NamespaceMismatch` for a
        malformed namespace or rank, `MessageTooLarge` beyond the bounds.
        """
        check_key(key)
        chunk = desc.chunk_tokens
        if not 0 <= key.start < key.end:
            raise BadRange(
                f"start {key.start}, end {key.end}", where="key", available="0 <= start < end", hint="ask for tokens"
            )
        if key.start % chunk or key.end % chunk:
            raise BadRange(
                f"start {key.start} and end {key.end} are no chunk boundaries", where="key",
                available=f"multiples of {chunk} tokens", hint="round to the namespace's chunk",
            )  # fmt: skip
        ranks = range(key.world_size) if key.worker_id is None else (key.worker_id,)
        chunks = (key.end - key.start) // chunk
        if chunks * len(ranks) * len(desc.groups) > MAX_OBJECTS:
            raise MessageTooLarge(
                f"{chunks} chunks of {len(ranks)} ranks and {len(desc.groups)} layer groups", where="key",
                available=f"at most {MAX_OBJECTS} objects a request",
            )  # fmt: skip
        if key.tokens and key.end > MAX_RAW_TOKENS:
            raise MessageTooLarge(
                f"{key.end} tokens to hash", where="key", available=f"at most {MAX_RAW_TOKENS} as token ids",
                hint="hash once and send digests",
            )  # fmt: skip
        digests = self._digests(key, chunk)
        salt = salt_digest(key.cache_salt)
        prefixes = [key_prefix(key.namespace, salt, rank, group) for rank in ranks for group in range(len(desc.groups))]
        flat = [prefix + digest for digest in digests for prefix in prefixes]
        return KeyGrid(desc, ranks, chunks, flat)

    def _digests(self, key: CacheKey, chunk: int) -> list[bytes]:
        if bool(key.tokens) == bool(key.digests):
            raise BadRange(
                "the content has both forms" if key.tokens else "the content is empty",
                where="key", available="either tokens or digests",
            )  # fmt: skip
        if key.digests:
            packed, expected, unit = key.digests, key.end // chunk * DIGEST_BYTES, "digests"
        else:
            packed, expected, unit = key.tokens, key.end * TOKEN_BYTES, "tokens"
        if len(packed) != expected:
            raise BadRange(
                f"{unit} has {len(packed)} bytes", where="key", available=f"{expected} bytes for end {key.end}",
                hint="the content covers the request from its first token to end",
            )  # fmt: skip
        if key.tokens:
            packed = self._hasher.chunk_digests(packed, chunk)
        first = key.start // chunk * DIGEST_BYTES
        return [packed[at : at + DIGEST_BYTES] for at in range(first, len(packed), DIGEST_BYTES)]


def check_key(key: CacheKey) -> None:
    """What must hold of a key before its namespace is known."""
    if len(key.namespace) != NAMESPACE_BYTES:
        raise NamespaceMismatch(f"the namespace has {len(key.namespace)} bytes", available=f"{NAMESPACE_BYTES} bytes")
    if not 1 <= key.world_size <= MAX_WORLD_SIZE:
        raise NamespaceMismatch(f"world size {key.world_size}", where="key", available=f"1 to {MAX_WORLD_SIZE}")
    if key.worker_id is not None and not 0 <= key.worker_id < key.world_size:
        raise NamespaceMismatch(
            f"worker id {key.worker_id}", where="key", available=f"0 to {key.world_size - 1}, or none for all ranks"
        )
    for name, text in (("request_id", key.request_id), ("model_name", key.model_name), ("cache_salt", key.cache_salt)):
        if len(text) > MAX_TEXT:
            raise MessageTooLarge(f"{name} has {len(text)} characters", where="key", available=f"at most {MAX_TEXT}")
