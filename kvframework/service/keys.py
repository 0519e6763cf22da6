"""The resolution of a cache key to object keys, used by every path. Stateless: it keeps nothing of a request."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, cycle, product, repeat
from typing import TypeVar, cast

from kvframework.api.hasher import DIGEST_BYTES, TOKEN_BYTES, KeyHasher
from kvframework.api.keys import NAMESPACE_BYTES, CacheKey, PackedKey, key_prefix, salt_digest
from kvframework.api.layout import GroupDesc, MemoryLayoutDesc
from kvframework.errors import BadRange, MessageTooLarge, NamespaceMismatch
from kvframework.storage.l1.leases import NO_PROMPT, PromptPart


def window_chunks(window: int, chunk_tokens: int) -> int:
    """Return how many chunks a window of `window` tokens needs before any chunk boundary; 0 for full attention."""
    return -(-window // chunk_tokens)


def hit_chunks(rows: Sequence[Sequence[object]], windows: Sequence[int]) -> int:
    """Return the longest hit in chunks. `rows[r][c]`: object c of row r exists; `windows[r]` in chunks, 0: full."""
    whole = [prefix_chunks(row) for row, window in zip(rows, windows, strict=True) if not window]
    bound = min(whole, default=len(rows[0]) if rows else 0)
    if not any(windows):
        return bound
    usable = [_usable_ends(row, window) for row, window in zip(rows, windows, strict=True) if window]
    for end in range(bound, 0, -1):
        if all(ends[end] for ends in usable):
            return end
    return 0


def needed_chunks(end: int, window: int) -> range:
    return range(max(end - window, 0) if window else 0, end)


def prefix_chunks(row: Sequence[object]) -> int:
    return len(row) if all(row) else list(map(bool, row)).index(False)


def _usable_ends(row: Sequence[object], window: int) -> list[bool]:
    run = 0
    ends = [True]
    for index, there in enumerate(row, start=1):
        run = run + 1 if there else 0
        ends.append(run >= min(index, window))
    return ends


MAX_WORLD_SIZE = 4096
MAX_OBJECTS = 1 << 15
MAX_TOKENS = 1 << 32
MAX_TEXT = 1024
# Hashing more on the serving thread would delay other clients.
MAX_RAW_TOKENS = 1 << 18
# Digests, or rows, for which what all requests of that number share is remembered: 16 KiB at most for each number.
_SMALL = 256

T = TypeVar("T")
# Finds the objects of one row, by the row's key prefix and digests; None for a missing one.
RowOf = Callable[[bytes, Sequence[bytes]], "list[T | None]"]


class KeyGrid:
    """The objects of one request: chunks x ranks x layer groups. A row is one (rank, layer group), rank by rank; its
    keys consist of one of `prefixes` followed by each of the chunks' `digests`. `has_windows`: a hit may do without
    some of the objects before its end."""

    __slots__ = ("_flat", "desc", "digests", "has_windows", "prefixes", "ranks")

    def __init__(
        self, desc: MemoryLayoutDesc, ranks: Sequence[int], prefixes: Sequence[bytes], digests: Sequence[bytes]
    ) -> None:
        self.desc = desc
        self.ranks = ranks
        self.prefixes = prefixes
        self.digests = digests
        self._flat: list[PackedKey] | None = None
        self.has_windows = False
        for group in desc.groups:
            if group.window:
                self.has_windows = True

    @property
    def chunks(self) -> int:
        return len(self.digests)

    @property
    def ends_anywhere(self) -> bool:
        """Whether a hit that is cut anywhere is still one."""
        return not self.has_windows

    @property
    def row_groups(self) -> Sequence[GroupDesc]:
        return [*self.desc.groups] * len(self.ranks)

    @property
    def main_prefix(self) -> bytes:
        """The prefix of the first row of full attention, else of the first row: it needs the most chunks."""
        if not self.has_windows:
            return self.prefixes[0]
        groups = self.desc.groups
        return self.prefixes[next((index for index, group in enumerate(groups) if not group.window), 0)]

    @property
    def flat(self) -> list[PackedKey]:
        """All keys, chunk by chunk, within each row by row. Computed on first use: a hit of L1 needs none."""
        if self._flat is None:
            self._flat = [prefix + digest for digest in self.digests for prefix in self.prefixes]
        return self._flat

    def sized(self) -> list[tuple[PackedKey, int]]:
        """Return each key with the bytes of its object."""
        return list(zip(self.flat, cycle([group.nbytes for group in self.row_groups]), strict=False))

    def place(self, index: int) -> tuple[int, int]:
        """Return (chunk, row) of an object of `flat`."""
        return divmod(index, len(self.prefixes))

    def at(self, index: int) -> int:
        """Return the chunk of the request in which an object of `flat` is, counted from its start."""
        return index // len(self.prefixes)

    def nbytes_of(self, index: int) -> int:
        """Return the bytes of an object of `flat`."""
        return self.desc.groups[index % len(self.desc.groups)].nbytes

    def nbytes(self, chunks: int) -> int:
        """Return the bytes that a hit of `chunks` uses."""
        rows = zip(self.row_groups, self._windows, strict=True)
        return sum([group.nbytes * len(needed_chunks(chunks, window)) for group, window in rows])

    def by_row(self) -> dict[tuple[int, int], list[PackedKey]]:
        """Return the keys by (rank, layer group), each in the order of chunks."""
        rows = product(self.ranks, range(len(self.desc.groups)))
        return {
            row: [prefix + digest for digest in self.digests] for row, prefix in zip(rows, self.prefixes, strict=True)
        }

    def find(self, row_of: RowOf[T], most: int | None = None) -> tuple[int, list[T]]:
        """Return (usable chunks, objects that this hit uses, chunk by chunk), of the first `most` chunks (None: all).
        `row_of` finds one row's objects, all true; rows of full attention are queried first, each only as far as the
        earlier rows reach."""
        count = len(self.prefixes)
        windows = self._windows if self.has_windows else [0] * count
        order = sorted(range(count), key=windows.__getitem__) if self.has_windows else range(count)
        rows: list[list[T | None]] = [[]] * count
        bound = self.chunks if most is None else most
        for index in order:
            digests = self.digests if bound == self.chunks else self.digests[:bound]
            rows[index] = row = row_of(self.prefixes[index], digests)
            if not windows[index] and not all(row):
                bound = row.index(None)
                if not bound:
                    return 0, []
        if not self.has_windows:
            # The shortest row ends it. All remaining objects exist.
            return bound, cast("list[T]", _by_chunk(rows)[: bound * count])
        hit = hit_chunks([row[:bound] for row in rows], windows)
        return hit, _used(rows, windows, hit)

    def whole(self, row_of: RowOf[T]) -> list[T] | None:
        """Return the objects that a hit of all chunks uses, chunk by chunk; None if any of them is missing."""
        rows: list[list[T | None]] = []
        windows = self._windows
        for prefix, window in zip(self.prefixes, windows, strict=True):
            first = needed_chunks(self.chunks, window).start
            found = row_of(prefix, self.digests[first:] if first else self.digests)
            if not all(found):
                return None
            rows.append([*repeat(None, first), *found] if first else found)
        return _used(rows, windows, self.chunks) if self.has_windows else cast("list[T]", _by_chunk(rows))

    def first_missing(self, row_of: RowOf[T], hit: int) -> tuple[int, PackedKey] | None:
        """Return (chunk, key) of the first object that a hit of all chunks would use and `row_of` does not find, given
        that the hit is `hit` chunks; None if there is none."""
        # Without windows it is in the chunk behind the hit.
        first, end = None, self.chunks if self.has_windows else min(hit + 1, self.chunks)
        for prefix, window in zip(self.prefixes, self._windows, strict=True):
            start = needed_chunks(self.chunks, window).start if window else hit
            chunk = start + prefix_chunks(row_of(prefix, self.digests[start:end]))
            if chunk < end:
                first, end = (chunk, prefix + self.digests[chunk]), chunk
            if chunk == hit:
                break  # nothing before the hit is missing
        return first

    def hit(self, available: Sequence[bool], most: int | None = None) -> int:
        """Return the number of usable chunks, of the first `most` (None: all), given which objects of `flat` exist."""
        rows = len(self.prefixes)
        end = None if most is None else most * rows
        return hit_chunks([available[row:end:rows] for row in range(rows)], self._windows)

    def needed(self, chunks: int) -> list[int]:
        """Return the indices into `flat` of the objects that a hit of `chunks` uses, in order."""
        rows = len(self.prefixes)
        if not self.has_windows:
            return list(range(chunks * rows))
        windows = self._windows
        return _used([range(row, self.chunks * rows, rows) for row in range(rows)], windows, chunks)

    def stored(self, first_chunks: Sequence[int]) -> list[int]:
        """Return the indices into `flat` of the objects that a store writes, without the first chunks of each row.
        Raises `BadRange` if a group of full attention, which needs every chunk, would lack any."""
        if not first_chunks:
            return list(range(len(self.flat)))
        most = [self.chunks if group.window else 0 for group in self.row_groups]
        count = len(most)
        if len(first_chunks) != count or any(not 0 <= a <= b for a, b in zip(first_chunks, most, strict=True)):
            raise BadRange(f"first_chunks is {[*first_chunks]}", where="first_chunks", available=f"at most {most}")
        return [index for index in range(len(self.flat)) if index // count >= first_chunks[index % count]]

    @property
    def _windows(self) -> list[int]:
        windows = [window_chunks(group.window, self.desc.chunk_tokens) for group in self.desc.groups]
        return windows * len(self.ranks)


@dataclass(eq=False)
class KeyResolver:
    """Resolves cache keys to object keys. Thread-safe, without state of requests. `orders` maps a namespace to the
    layer orders of ranks. `on_salts` receives the salts of keys, and that of their request, unless "";
    `on_conversation` the name of a request's conversation, unless "", and packed digests of its chunks."""

    hasher: KeyHasher
    orders: Callable[[bytes], Mapping[int, bytes]] = lambda _namespace: {}
    on_salts: Callable[[str, Iterable[bytes]], None] | None = None
    on_conversation: Callable[[str, bytes], None] = lambda _conversation, _digests: None

    def prefixes(self, namespace: bytes, cache_salt: str, ranks: Sequence[int], groups: int) -> list[bytes]:
        """Return the prefixes of the object keys of `ranks`, rank by rank and in each by layer group."""
        orders = self.orders(namespace)
        salts = {order: salt_digest(cache_salt, order) for order in {b"", *orders.values()}}
        if cache_salt and self.on_salts is not None:
            self.on_salts(cache_salt, salts.values())
        if not orders:  # the usual case
            start = namespace + salts[b""]
            of = _remembered_ends if len(ranks) * groups <= _SMALL else _prefix_ends
            return [start + end for end in of(tuple(ranks), groups)]
        return [
            key_prefix(namespace, salts[orders.get(rank, b"")], rank, group)
            for rank in ranks
            for group in range(groups)
        ]

    def resolve(self, key: CacheKey, desc: MemoryLayoutDesc, ranks: Sequence[int] = ()) -> KeyGrid:
        """Return the objects that a checked `key` names for `ranks`; (): its rank or, without one, all. Raises
        `BadRange` if start, end, content and chunk size do not fit each other, `MessageTooLarge` beyond bounds."""
        chunk = desc.chunk_tokens
        if key.start % chunk or key.end % chunk:
            fact = f"start {key.start} and end {key.end} are not chunk boundaries"
            hint = "round to whole chunks"
            raise BadRange(fact, where="key", available=f"multiples of {chunk} tokens", hint=hint)
        ranks = ranks or (range(key.world_size) if key.worker_id is None else (key.worker_id,))
        chunks = (key.end - key.start) // chunk
        if chunks * len(ranks) * len(desc.groups) > MAX_OBJECTS:
            raise MessageTooLarge(
                f"the request has {chunks} chunks of {len(ranks)} ranks and {len(desc.groups)} layer groups",
                where="key",
                available=f"at most {MAX_OBJECTS} objects in all",
            )
        if key.tokens and key.end > MAX_RAW_TOKENS:
            raise MessageTooLarge(
                f"the request has {key.end} token ids",
                where="key",
                available=f"at most {MAX_RAW_TOKENS} token ids",
                hint="hash the tokens in the client and send digests",
            )
        digests = self._digests(key, chunk)
        prefixes = self.prefixes(key.namespace, key.cache_salt, ranks, len(desc.groups))
        return KeyGrid(desc, ranks, prefixes, digests)

    def _digests(self, key: CacheKey, chunk: int) -> Sequence[bytes]:
        if bool(key.tokens) == bool(key.digests):
            fact = "the content has both tokens and digests" if key.tokens else "the content is empty"
            raise BadRange(fact, where="key", available="tokens or digests")
        if key.digests:
            packed, expected, unit = key.digests, key.end // chunk * DIGEST_BYTES, "digests"
        else:
            packed, expected, unit = key.tokens, key.end * TOKEN_BYTES, "tokens"
        if len(packed) != expected:
            hint = "send the content from the request's first token to end"
            available = f"{expected} bytes, since the range ends at token {key.end}"
            raise BadRange(f"{unit} has {len(packed)} bytes", where="key", available=available, hint=hint)
        if key.tokens:
            packed = self.hasher.chunk_digests(packed, chunk)
        if key.conversation:
            self.on_conversation(key.conversation, packed)
        first = key.start // chunk
        count = len(packed) // DIGEST_BYTES - first
        if count <= _SMALL:  # one call, instead of a slice for each
            return _digests_form(count).unpack_from(packed, first * DIGEST_BYTES)
        return [packed[at : at + DIGEST_BYTES] for at in range(first * DIGEST_BYTES, len(packed), DIGEST_BYTES)]


@lru_cache(_SMALL)
def _digests_form(count: int) -> struct.Struct:
    return struct.Struct(f"{DIGEST_BYTES}s" * count)


def _prefix_ends(ranks: tuple[int, ...], groups: int) -> list[bytes]:
    return [key_prefix(b"", b"", rank, group) for rank in ranks for group in range(groups)]


_remembered_ends = lru_cache(64)(_prefix_ends)


def _by_chunk(rows: Sequence[list[T | None]]) -> list[T | None]:
    return rows[0] if len(rows) == 1 else list(chain.from_iterable(zip(*rows, strict=False)))


def _used(rows: Sequence[Sequence[T | None]], windows: Sequence[int], chunks: int) -> list[T]:
    """Return the items of the rows that a hit of `chunks` uses, chunk by chunk."""
    spans = [needed_chunks(chunks, window) for window in windows]
    parts = [[*repeat(None, span.start), *row[span.start : chunks]] for row, span in zip(rows, spans, strict=True)]
    return [item for item in chain.from_iterable(zip(*parts, strict=True)) if item is not None]


def unpacked(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


def check_key(key: CacheKey) -> None:
    """Check a key as far as possible without its namespace; called once per request. Raises `NamespaceMismatch` for a
    malformed namespace or rank, `BadRange` for a range without tokens, `MessageTooLarge` beyond the bounds."""
    if len(key.namespace) != NAMESPACE_BYTES:
        raise NamespaceMismatch(f"the namespace has {len(key.namespace)} bytes", available=f"{NAMESPACE_BYTES} bytes")
    if not 1 <= key.world_size <= MAX_WORLD_SIZE:
        raise NamespaceMismatch(f"the world size is {key.world_size}", where="key", available=f"1 to {MAX_WORLD_SIZE}")
    if key.worker_id is not None and not 0 <= key.worker_id < key.world_size:
        raise NamespaceMismatch(
            f"worker id is {key.worker_id}", where="key", available=f"0 to {key.world_size - 1}, or none for all ranks"
        )
    for name in ("request_id", "model_name", "cache_salt", "conversation"):
        text = getattr(key, name)
        if len(text) > MAX_TEXT:
            raise MessageTooLarge(f"{name} has {len(text)} characters", where="key", available=f"at most {MAX_TEXT}")
    if not 0 <= key.start < key.end:
        raise BadRange(
            f"start {key.start}, end {key.end}", where="key", available="0 <= start < end", hint="ask for tokens"
        )
    if key.end > MAX_TOKENS:
        raise MessageTooLarge(f"the range ends at token {key.end}", where="key", available=f"at most {MAX_TOKENS}")


def prompt_part(key: CacheKey, grid: KeyGrid, wanted: Sequence[int]) -> PromptPart:
    """Return where in the prompt the objects with these indices are, for the eviction policy."""
    tokens = grid.desc.chunk_tokens
    first = key.start // tokens
    return PromptPart([first + grid.at(index) for index in wanted], tokens, key.retain)


def found_part(key: CacheKey, grid: KeyGrid, hit: int) -> PromptPart:
    """Return it for the objects that a hit of `hit` chunks uses, if the request says anything of their future."""
    return prompt_part(key, grid, grid.needed(hit)) if key.retain else NO_PROMPT
