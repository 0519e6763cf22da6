"""The objects of a request that names its keys itself, group by group, in place of one prompt in chunks of one size.

An engine whose layer groups have chunks of different sizes, and names of its own for them, says for each group which
tokens a hit needs: all before its end, or the last ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import TypeVar

from kvframework.api.hasher import DIGEST_BYTES
from kvframework.api.keys import CacheKey, PackedKey
from kvframework.api.layout import MemoryLayoutDesc
from kvframework.errors import BadRange, MessageTooLarge, NamespaceMismatch
from kvframework.service.keys import MAX_OBJECTS, KeyGrid, KeyResolver, RowOf, prefix_chunks, unpacked
from kvframework.wire.messages import KeyGroup

T = TypeVar("T")

# Each place where a hit may end is looked at for each group, on the serving thread.
MOST_ENDS = 1 << 19


class KeySet(KeyGrid):
    """The objects of one request, one row a layer group; `flat` has them row by row. A chunk of the grid is
    `desc.chunk_tokens` tokens, from `start` on, of which each row's own chunk is a multiple. `groups` say how many
    tokens a row's chunk has, the index of its first one, and which tokens before its end a hit needs."""

    __slots__ = ("_ends", "_sizes", "end", "groups", "rows", "start")

    def __init__(
        self, desc: MemoryLayoutDesc, prefixes: Sequence[bytes], groups: Sequence[KeyGroup], start: int, end: int
    ) -> None:
        self.groups = groups
        self.rows = [unpacked(group.digests) for group in groups]
        main = next((row for row, group in enumerate(groups) if not group.window and self.rows[row]), 0)
        # What stands for the prompt in the counts: each unit of it has the digest of the chunk it is in.
        unit, tokens, first = desc.chunk_tokens, groups[main].tokens, groups[main].first
        ends = range(max(start, first * tokens), min(end, (first + len(self.rows[main])) * tokens), unit)
        super().__init__(desc, (0,), prefixes, [self.rows[main][at // tokens - first] for at in ends])
        self.has_windows = True
        self.start, self.end = start, end
        self._ends = list(accumulate(map(len, self.rows)))
        self._sizes = [group.nbytes for group in desc.groups]

    @property
    def ends_anywhere(self) -> bool:
        return not any(group.window for group in self.groups)

    @property
    def main_prefix(self) -> bytes:
        return self.prefixes[next((row for row, group in enumerate(self.groups) if not group.window), 0)]

    @property
    def chunks(self) -> int:
        return (self.end - self.start) // self.desc.chunk_tokens

    @property
    def flat(self) -> list[PackedKey]:
        if self._flat is None:
            self._flat = [
                prefix + digest for prefix, row in zip(self.prefixes, self.rows, strict=True) for digest in row
            ]
        return self._flat

    def sized(self) -> list[tuple[PackedKey, int]]:
        return [(key, self.nbytes_of(index)) for index, key in enumerate(self.flat)]

    def place(self, index: int) -> tuple[int, int]:
        row = next(row for row, end in enumerate(self._ends) if index < end)
        return index - self._ends[row] + len(self.rows[row]), row

    def at(self, index: int) -> int:
        chunk, row = self.place(index)
        tokens = (self.groups[row].first + chunk) * self.groups[row].tokens
        return max(tokens - self.start, 0) // self.desc.chunk_tokens

    def nbytes_of(self, index: int) -> int:
        return self._sizes[self.place(index)[1]]

    def nbytes(self, chunks: int) -> int:
        return sum(
            [size * (part.stop - part.start) for size, part in zip(self._sizes, self._spans(chunks), strict=True)]
        )

    def find(self, row_of: RowOf[T], most: int | None = None) -> tuple[int, list[T]]:
        rows = [row_of(prefix, row) for prefix, row in zip(self.prefixes, self.rows, strict=True)]
        hit = self._hit(rows, most)
        return hit, [found for row, part in zip(rows, self._spans(hit), strict=True) for found in row[part] if found]

    def whole(self, row_of: RowOf[T]) -> list[T] | None:
        hit, objects = self.find(row_of)
        return objects if hit == self.chunks else None

    def first_missing(self, row_of: RowOf[T], hit: int) -> tuple[int, PackedKey] | None:
        missing = []
        for row, part in enumerate(self._spans(self.chunks)):
            digests = self.rows[row][part]
            lacks = prefix_chunks(row_of(self.prefixes[row], digests))
            if lacks < len(digests):
                index = self._ends[row] - len(self.rows[row]) + part.start + lacks
                missing.append((max(self.at(index), hit), self.prefixes[row] + digests[lacks]))
        return min(missing, default=None)

    def hit(self, available: Sequence[bool], most: int | None = None) -> int:
        starts = [0, *self._ends]
        return self._hit([available[begin:end] for begin, end in zip(starts, self._ends, strict=False)], most)

    def needed(self, chunks: int) -> list[int]:
        starts = [0, *self._ends]
        spans = zip(starts, self._spans(chunks), strict=False)
        return list(chain.from_iterable(range(begin + part.start, begin + part.stop) for begin, part in spans))

    def stored(self, first_chunks: Sequence[int]) -> list[int]:
        if first_chunks:
            raise BadRange("first_chunks is set in a request with keys by group", where="first_chunks", available="()")
        return list(range(len(self.flat)))

    def _hit(self, rows: Sequence[Sequence[object]], most: int | None) -> int:
        """Return the longest usable hit in chunks of the grid, of the first `most`, given what exists of each row."""
        unit = self.desc.chunk_tokens
        if any(group.first * group.tokens > self.start for group in self.groups):
            return 0  # nobody has said what lies before these keys
        end = self.end if most is None else min(self.end, self.start + most * unit)
        step, runs = unit, []
        for row, group in zip(rows, self.groups, strict=True):
            if group.aligned:
                step = math.lcm(step, group.tokens)
            if group.window:
                # How many chunks in a row exist before each boundary.
                runs.append(list(accumulate(row, lambda run, there: run + 1 if there else 0, initial=0)))
                end = min(end, (group.first + len(row)) * group.tokens)
            else:
                runs.append([])
                end = min(end, (group.first + prefix_chunks(row)) * group.tokens)
        for last in range(end // step * step, self.start, -step):
            if all(not run or len(part := self._span(row, last)) <= run[part.stop] for row, run in enumerate(runs)):
                return (last - self.start) // unit
        return 0

    def _spans(self, chunks: int) -> list[slice]:
        if not chunks:
            return [slice(0, 0)] * len(self.rows)
        spans = [self._span(row, self.start + chunks * self.desc.chunk_tokens) for row in range(len(self.rows))]
        return [slice(part.start, part.stop) for part in spans]

    def _span(self, row: int, end: int) -> range:
        """Return which items of a row a hit up to token `end` uses."""
        group = self.groups[row]
        begin = max(end - group.window, self.start) if group.window else self.start
        return range(
            max(begin // group.tokens - group.first, 0), min(-(-end // group.tokens) - group.first, len(self.rows[row]))
        )


def key_set(resolver: KeyResolver, key: CacheKey, desc: MemoryLayoutDesc, groups: Sequence[KeyGroup]) -> KeySet:
    """The objects of `groups`. Raises `NamespaceMismatch`, `BadRange` or `MessageTooLarge` for keys that do not fit."""
    if len(groups) != len(desc.groups):
        raise NamespaceMismatch(
            f"found keys of {len(groups)} layer groups", where="groups", available=f"{len(desc.groups)} as registered"
        )
    objects, unit = sum(len(group.digests) for group in groups) // DIGEST_BYTES, desc.chunk_tokens
    if not 0 < objects <= MAX_OBJECTS:
        raise MessageTooLarge(f"the request has {objects} keys", where="groups", available=f"1 to {MAX_OBJECTS}")
    if key.start % unit or key.end % unit or key.tokens or key.digests:
        fact = f"start is {key.start}, end is {key.end}, or the request has content of its key"
        raise BadRange(fact, where="key", available=f"multiples of {unit} tokens, and no content")
    ends = (key.end - key.start) // unit
    if ends * len(groups) > MOST_ENDS:
        raise MessageTooLarge(
            f"the request has {ends} tokens where a hit may end, for {len(groups)} layer groups",
            where="key",
            available=f"a product of at most {MOST_ENDS}",
            hint="ask for fewer tokens at once, or register chunks whose greatest common divisor is larger",
        )
    for index, group in enumerate(groups):
        if len(group.digests) % DIGEST_BYTES or group.tokens % unit:
            raise BadRange(
                f"a layer group has {len(group.digests)} bytes of digests for chunks of {group.tokens} tokens",
                where=f"groups[{index}]",
                available=f"{DIGEST_BYTES} bytes for each chunk, chunks of multiples of {unit} tokens",
            )
        chunks = len(group.digests) // DIGEST_BYTES
        if chunks and (group.first + chunks - 1) * group.tokens >= key.end:
            raise BadRange(
                f"a layer group has {chunks} chunks of {group.tokens} tokens from chunk {group.first} on",
                where=f"groups[{index}]",
                available=f"chunks that begin before the key's end, token {key.end}",
            )
    if key.conversation:
        for group in groups:
            resolver.on_conversation(key.conversation, group.digests)
    prefixes = resolver.prefixes(key.namespace, key.cache_salt, (0,), len(groups))
    return KeySet(desc, prefixes, groups, key.start, key.end)
