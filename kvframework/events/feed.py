"""What the serving thread and the storage threads hand over: which objects came and went, and what tokens they are of.

An entry is a tuple of what the caller has anyway, about 0.2 us. The queues are bounded: an entry beyond is dropped and
counted, and the reader learns that it has to look at L1 itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from kvframework.api.content import ChunkContent
from kvframework.api.keys import CacheKey, PackedKey
from kvframework.events.known import L1
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
