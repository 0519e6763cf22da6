"""What the serving thread and the storage threads hand over: which objects came and went, and what tokens they are of.

An entry is a tuple of what the caller has anyway, about 0.2 us. The queues are bounded: an entry beyond is dropped and
counted, and the reader learns that it has to look at L1 itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

from kvframework.api.hasher import DIGEST_BYTES, TOKEN_BYTES, KeyHasher
from kvframework.api.keys import CacheKey, PackedKey
from kvframework.api.transfer import ChunkContent
from kvframework.events.known import L1, Chunk, Known, Line, News, chunks_of, verified
from kvframework.wire.protocol import SALTED_TOKEN_IDS, TOKEN_IDS

# Objects that came or went, in entries of a commit or a removal each.
MOST_OBJECTS = 1 << 17
# Bytes of token ids, and of what else contents say, that wait.
MOST_CONTENT_BYTES = 64 << 20

# What an entry, an extra or an image takes besides, about.
_ENTRY_BYTES = 256

# A place, its objects, and whether each of them is there.
Objects = tuple[int, Sequence[PackedKey], Sequence[bool] | bool]


class Events:
    """What storage and service know of events; this one announces nothing. Methods are thread-safe and never block."""

    wanted = False
    # Names for HELLO of the contents that are wanted.
    features: tuple[str, ...] = ()

    def came(self, keys: Sequence[PackedKey]) -> None:
        """Objects are in L1 now. Called under the lock of L1."""

    def went(self, key: PackedKey) -> None:
        """An object has left L1. Called under the lock of L1."""

    def seen(self, place: int, keys: Sequence[PackedKey], there: Sequence[bool] | bool) -> None:
        """A tier has said whether it has objects; `place` is its number, from 1."""

    def named(self, key: CacheKey, content: ChunkContent | None) -> None:
        """The tokens of a key whose objects are stored or loaded; None if the key has them itself."""


NO_EVENTS = Events()


class Feed(Events):
    """The queues; the contents of salted prompts are wanted with `salts`. `take_objects`, `take_contents` and
    `take_loss` are the reader's, one thread."""

    wanted = True

    def __init__(self, *, salts: bool = False) -> None:
        self.features = (TOKEN_IDS, SALTED_TOKEN_IDS) if salts else (TOKEN_IDS,)
        self.dropped = 0
        self._lost = False
        self._objects: deque[Objects] = deque()
        self._contents: deque[tuple[CacheKey, ChunkContent | None]] = deque()
        self._content_bytes = self._waiting_objects = 0
        self._counting = threading.Lock()

    @property
    def waiting(self) -> int:
        return len(self._objects) + len(self._contents)

    def came(self, keys: Sequence[PackedKey]) -> None:
        self._add((L1, keys, True))

    def went(self, key: PackedKey) -> None:
        self._add((L1, (key,), False))

    def seen(self, place: int, keys: Sequence[PackedKey], there: Sequence[bool] | bool) -> None:
        self._add((place, keys, there))

    def named(self, key: CacheKey, content: ChunkContent | None) -> None:
        nbytes = _size(key, content)
        with self._counting:
            if self._content_bytes + nbytes > MOST_CONTENT_BYTES:
                # The next request that uses the chunks brings their tokens again.
                self.dropped += 1
                return
            self._content_bytes += nbytes
        self._contents.append((key, content))

    def take_objects(self) -> list[Objects]:
        taken = _taken(self._objects)
        with self._counting:
            self._waiting_objects -= sum(len(keys) for _, keys, _ in taken)
        return taken

    def take_contents(self) -> list[tuple[CacheKey, ChunkContent | None]]:
        taken = _taken(self._contents)
        with self._counting:
            self._content_bytes -= sum(_size(*each) for each in taken)
        return taken

    def take_loss(self) -> bool:
        """Return whether entries about objects were dropped since the last call: what L1 has must be asked."""
        with self._counting:
            lost, self._lost = self._lost, False
        return lost

    def _add(self, entry: Objects) -> None:
        count = len(entry[1])
        with self._counting:
            if self._waiting_objects + count > MOST_OBJECTS:
                self.dropped += 1
                self._lost = True
                return
            self._waiting_objects += count
        self._objects.append(entry)


def _size(key: CacheKey, content: ChunkContent | None) -> int:
    size = len(key.tokens) + len(key.digests) + _ENTRY_BYTES
    if content is not None:
        size += len(content.tokens) + len(content.hashes) + _ENTRY_BYTES * (len(content.extras) + len(content.images))
        size += sum(len(each.content) for each in content.extras)
    return size


def _taken(queue: deque) -> list:  # type: ignore[type-arg]
    taken = []
    for _ in range(len(queue)):
        taken.append(queue.popleft())
    return taken


# From what the server does to what routers hear: the feed is read, contents are checked, news come out.
#
# A content counts only if it hashes to the digests under which the objects lie: so no client makes routers believe
# anything of another's prompts. Runs in the publisher's thread; holds no lock but for the moments of `present`.

# Objects of a chunk beyond which it is not announced.
MOST_ROWS = 1 << 12
# Chunks whose objects are asked for while L1 is locked.
_AT_ONCE = 256
# Entries after which other threads get their turn.
_ENTRIES_AT_ONCE = 512


class Shape(NamedTuple):
    """What a chunk of a namespace and salt is made of: the key prefix of each object that a hit needs."""

    model: str
    chunk_tokens: int
    prefixes: Sequence[bytes]


class Teller:
    """See the module. `shape_of` returns the shape of a namespace and salt, None if the namespace is not known;
    `present` returns which objects are in L1; `pause` gives way to other threads. Salted prompts are announced only
    with `salts`."""

    def __init__(
        self,
        feed: Feed,
        hasher: KeyHasher,
        *,
        block_size: int,
        salts: bool,
        shape_of: Callable[[bytes, str], Shape | None],
        present: Callable[[Sequence[PackedKey]], Sequence[bool]],
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        self.known = Known()
        # Contents that are not what their digests name, and those that are withheld: salted, cut otherwise than the
        # router cuts, or with an extra that says nothing to it.
        self.mismatched = 0
        self.withheld = 0
        self._feed = feed
        self._hasher = hasher
        self._block_size = block_size
        self._salts = salts
        self._shape_of = shape_of
        self._present = present
        self._pause = pause

    def turn(self) -> list[News]:
        """Return what routers must hear, after all that was handed over until now."""
        lost = self._feed.take_loss()
        for number, (place, objects, there) in enumerate(self._feed.take_objects(), 1):
            if not number % _ENTRIES_AT_ONCE:
                self._pause()
            for each, here in zip(objects, repeat(there) if isinstance(there, bool) else there, strict=False):
                (self.known.came if here else self.known.went)(each, place)
        if lost:
            self._look_again()
        for key, content in self._feed.take_contents():
            self._name(key, content)
            self._pause()
        return self.known.take()

    def adopt(self, namespace: bytes, chunks: Sequence[Chunk]) -> None:
        """Name unsalted chunks that an earlier server has checked."""
        shape = self._shape_of(namespace, "")
        if shape is not None:
            self._learn(namespace, "", shape, chunks)

    def _name(self, key: CacheKey, content: ChunkContent | None) -> None:
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
        line = self.known.line(key.namespace, key.cache_salt)
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

    def _learn(self, namespace: bytes, salt: str, shape: Shape, chunks: Sequence[Chunk]) -> None:
        self.known.name(namespace, shape.model, salt, shape.prefixes, self._with_presence(chunks, shape.prefixes))

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
        """Make what is known equal to L1, after entries of the feed were dropped; tiers are learnt again by use."""
        self.known.forget_tiers()
        for line in list(self.known.lines.values()):
            chunks = [held.chunk for held in line.held.values()]
            for chunk, present in list(self._with_presence(chunks, line.prefixes)):
                self.known.are(line, chunk.digest, present)


def _all_named(line: Line, digests: bytes, first: int) -> bool:
    return all(digests[at : at + DIGEST_BYTES] in line for at in range(first, len(digests), DIGEST_BYTES))
