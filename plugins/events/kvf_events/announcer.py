"""From records of the server to what routers hear: contents are checked, news come out.

A content counts only if it hashes to the digests under which the objects lie: so no client makes routers believe
anything of another's prompts. Runs in the publisher's thread; holds no lock but for the moments of `present`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat

from kvf_events.block_index import L1, BlockIndex, Line, News
from kvf_events.chunks import Chunk, chunks_of, verified
from kvframework.api.hasher import DIGEST_BYTES, TOKEN_BYTES, KeyHasher
from kvframework.api.keys import CacheKey, ChunkContent, PackedKey
from kvframework.api.listener import Accessed, Added, Batch, ChunkShape, Registered, Removed

# Objects of a chunk beyond which it is not announced.
MOST_ROWS = 1 << 12
# Chunks whose objects are asked for while L1 is locked.
_AT_ONCE = 256
# Records after which other threads get their turn.
_RECORDS_AT_ONCE = 512


class Announcer:
    """See the module. `shape_of` returns the shape of a namespace and salt, None if the namespace is not known;
    `present` returns which objects are in L1; `pause` gives way to other threads. Salted prompts are announced only
    with `salts`."""

    def __init__(
        self,
        hasher: KeyHasher,
        *,
        block_size: int,
        salts: bool,
        shape_of: Callable[[bytes, str], ChunkShape | None],
        present: Callable[[Sequence[PackedKey]], Sequence[bool]],
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        self.index = BlockIndex()
        # Contents that are not what their digests name, and those that are withheld: salted, cut otherwise than the
        # router cuts, or with an extra that says nothing to it.
        self.mismatched = 0
        self.withheld = 0
        self._hasher = hasher
        self._block_size = block_size
        self._salts = salts
        self._shape_of = shape_of
        self._present = present
        self._pause = pause

    def turn(self, batch: Batch) -> list[News]:
        registered = []
        for number, record in enumerate(batch.records, 1):
            if not number % _RECORDS_AT_ONCE:
                self._pause()
            if isinstance(record, Registered):
                registered.append(record)
            elif isinstance(record, Added | Removed | Accessed):
                self._change(record)
        if batch.lost:
            self._look_again()
        # Last: what L1 has now is asked for, and the changes before are known.
        for each in registered:
            self._register(each.key, each.content)
            self._pause()
        return self.index.take()

    def _change(self, record: Added | Removed | Accessed) -> None:
        tier, there = L1, isinstance(record, Added)
        found: Iterable[bool] = repeat(there)
        if isinstance(record, Accessed):
            tier = record.tier
            found = repeat(record.found) if isinstance(record.found, bool) else record.found
        for key, here in zip(record.keys, found, strict=False):
            (self.index.added if here else self.index.removed)(key, tier)

    def adopt(self, namespace: bytes, chunks: Sequence[Chunk]) -> None:
        """Name unsalted chunks that an earlier server has checked."""
        shape = self._shape_of(namespace, "")
        if shape is not None:
            self._learn(namespace, "", shape, chunks)

    def _register(self, key: CacheKey, content: ChunkContent | None) -> None:
        if key.cache_salt and not self._salts:
            self.withheld += 1
            return
        shape = self._shape_of(key.namespace, key.cache_salt)
        if shape is None or shape.chunk_tokens % self._block_size or not 0 < len(shape.prefixes) <= MOST_ROWS:
            self.withheld += 1
            return
        digests = key.digests or self._hasher.chunk_digests(key.tokens, shape.chunk_tokens)
        if content is None:
            content = ChunkContent(key.tokens[key.start * TOKEN_BYTES :])
        line = self.index.lines.get((key.namespace, key.cache_salt))
        first = key.start // shape.chunk_tokens * DIGEST_BYTES
        if line is not None and line.prefixes == tuple(shape.prefixes) and _all_named(line, digests, first):
            return
        if key.digests and not verified(content, digests, key.start, shape.chunk_tokens, self._hasher):
            self.mismatched += 1
            return
        chunks = chunks_of(
            content,
            digests,
            key.start,
            chunk_tokens=shape.chunk_tokens,
            block_size=self._block_size,
            model=shape.model,
            salt=key.cache_salt,
        )
        announced = [chunk for chunk in chunks if chunk is not None]
        self.withheld += len(chunks) - len(announced)
        self._learn(key.namespace, key.cache_salt, shape, announced)

    def _learn(self, namespace: bytes, salt: str, shape: ChunkShape, chunks: Sequence[Chunk]) -> None:
        self.index.register(namespace, shape.model, salt, shape.prefixes, self._with_presence(chunks, shape.prefixes))

    def _with_presence(
        self, chunks: Sequence[Chunk], prefixes: Sequence[bytes]
    ) -> Iterator[tuple[Chunk, Sequence[bool]]]:
        rows = len(prefixes)
        for first in range(0, len(chunks), _AT_ONCE):
            part = chunks[first : first + _AT_ONCE]
            here = self._present([prefix + chunk.digest for chunk in part for prefix in prefixes])
            for index, chunk in enumerate(part):
                yield chunk, here[index * rows : (index + 1) * rows]

    def _look_again(self) -> None:
        """Make what is known equal to L1, after records were lost; tiers are learnt again by use."""
        self.index.forget_tiers()
        for line in list(self.index.lines.values()):
            chunks = [held.chunk for held in line.held.values()]
            for chunk, present in list(self._with_presence(chunks, line.prefixes)):
                self.index.correct(line, chunk.digest, present)


def _all_named(line: Line, digests: bytes, first: int) -> bool:
    return all(digests[at : at + DIGEST_BYTES] in line for at in range(first, len(digests), DIGEST_BYTES))
