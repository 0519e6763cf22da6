"""What is announced to routers: the blocks of the chunks that the server can serve. A pure state machine.

A chunk is announced in a medium once all objects that a hit needs are there, and its parent is announced in any medium:
so a block never comes before its parent, and what is announced is what a request can hit. It stays so until the first
of its objects, or of its ancestors', leaves. A block that several chunks share is announced once, and removed with the
last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from kvf_events.chunks import Chunk
from kvframework.api.hasher import DIGEST_BYTES
from kvframework.api.keys import PACKED_KEY_BYTES, PackedKey

PREFIX_BYTES = PACKED_KEY_BYTES - DIGEST_BYTES
# Where objects lie: L1, then the tiers in their order.
L1 = 0
# Objects of tiers that no request has named, kept until one does.
MOST_UNNAMED = 1 << 16
# Chunks that are in tiers alone: about 2 KiB of memory each.
MOST_ASIDE = 1 << 18


class Medium(IntEnum):
    CPU = 0
    STORAGE = 1


class Stored(NamedTuple):
    """The blocks of a chunk from the block `first` on; `parent` is the hash of the block before, None for none."""

    model: str
    namespace: bytes
    salt: str
    medium: Medium
    chunk: Chunk
    first: int
    parent: int | None


class Removed(NamedTuple):
    model: str
    medium: Medium
    hashes: list[int]


News = Stored | Removed
# By model and medium: the number of announced chunks that have each block.
Counts = dict[tuple[str, Medium], dict[int, int]]


@dataclass(eq=False, slots=True)
class _Held:
    """A named chunk. `rows` has, by place, a bit for each object that is there; `announced` a bit for each medium."""

    chunk: Chunk
    rows: dict[int, int] = field(default_factory=dict)
    announced: int = 0


class Line:
    """The prompts of one model and salt that the same objects make up. A chunk's objects have the keys
    `prefix + digest`, one for each of `prefixes`; `namespace` and `salt` name the line."""

    def __init__(self, namespace: bytes, model: str, salt: str, prefixes: Sequence[bytes]) -> None:
        self.namespace = namespace
        self.model = model
        self.salt = salt
        self.prefixes = tuple(prefixes)
        self.whole = (1 << len(self.prefixes)) - 1
        self.held: dict[bytes, _Held] = {}
        # By the parent's digest, whether the parent is named or not.
        self.children: dict[bytes, dict[bytes, _Held]] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.held


class BlockIndex:
    """See the module. For one thread. `take` returns what changed."""

    def __init__(self) -> None:
        self._rows: dict[bytes, tuple[Line, int]] = {}
        self._unnamed: dict[PackedKey, set[int]] = {}
        # Chunks that are in tiers alone, with their lines, the oldest first.
        self._aside: dict[_Held, Line] = {}
        self._news: list[News] = []
        # By namespace and salt: those of which any chunk is named.
        self.lines: dict[tuple[bytes, str], Line] = {}
        # What is announced, none of it 0.
        self.counts: Counts = {}

    def register(
        self,
        namespace: bytes,
        model: str,
        salt: str,
        prefixes: Sequence[bytes],
        chunks: Iterable[tuple[Chunk, Sequence[bool]]],
    ) -> None:
        """Learn the content of chunks, and which of the objects of each L1 has. Nothing is kept of one that is nowhere,
        or that is named already. If the objects have other keys than before, since the order of the layers has changed,
        those from before are forgotten."""
        line = self.lines.get((namespace, salt))
        if line is not None and (line.prefixes != tuple(prefixes) or line.model != model):
            self._drop(line)
            line = None
        if line is None:
            line = self.lines[namespace, salt] = Line(namespace, model, salt, prefixes)
            self._rows.update((prefix, (line, 1 << row)) for row, prefix in enumerate(line.prefixes))
        for chunk, present in chunks:
            if chunk.digest not in line:
                self._register(line, chunk, present)
        if not line.held:
            self._unbind(line)

    def added(self, key: PackedKey, place: int) -> None:
        """An object is there now."""
        line, bit = self._rows.get(key[:PREFIX_BYTES], (None, 0))
        held = None if line is None else line.held.get(key[PREFIX_BYTES:])
        if line is not None and held is not None:
            held.rows[place] = held.rows.get(place, 0) | bit
            if place == L1:
                self._aside.pop(held, None)
            self._settle(line, held)
        elif place != L1:
            self._unnamed.setdefault(key, set()).add(place)
            if len(self._unnamed) > MOST_UNNAMED:
                del self._unnamed[next(iter(self._unnamed))]

    def removed(self, key: PackedKey, place: int) -> None:
        """An object is not there, or no longer."""
        line, bit = self._rows.get(key[:PREFIX_BYTES], (None, 0))
        held = None if line is None else line.held.get(key[PREFIX_BYTES:])
        if line is not None and held is not None:
            self._lack(line, held, place, bit)
        elif key in self._unnamed:
            self._unnamed[key].discard(place)

    def correct(self, line: Line, digest: bytes, present: Sequence[bool]) -> None:
        """Set which objects of a named chunk L1 has, whatever was known."""
        held = line.held.get(digest)
        if held is not None:
            held.rows[L1] = sum(1 << row for row, here in enumerate(present) if here)
            self._lack(line, held, L1, 0)

    def forget_tiers(self) -> None:
        self._unnamed.clear()
        for line in list(self.lines.values()):
            for held in list(line.held.values()):
                for place in [each for each in held.rows if each != L1]:
                    self._lack(line, held, place, line.whole)

    def forget(self) -> None:
        """Forget all: whatever is announced is removed."""
        self._unnamed.clear()
        for line in list(self.lines.values()):
            self._drop(line)

    def take(self) -> list[News]:
        news, self._news = self._news, []
        return news

    def announced(self) -> dict[tuple[str, Medium], set[int]]:
        """Return the hashes of all announced blocks."""
        return {of: set(counts) for of, counts in self.counts.items() if counts}

    def kept(self) -> Iterator[tuple[Line, Chunk]]:
        """Yield the unsalted chunks that L1 has objects of."""
        for line in self.lines.values():
            if not line.salt:
                yield from ((line, held.chunk) for held in line.held.values() if L1 in held.rows)

    @property
    def blocks(self) -> dict[str, int]:
        """The number of announced blocks by medium. From any thread."""
        counted = list(self.counts.items())
        return {medium.name: sum(len(counts) for (_, each), counts in counted if each is medium) for medium in Medium}

    def snapshot(self) -> Iterator[Stored]:
        """Yield what is announced, each block once and after its parent. Nothing may change meanwhile."""
        seen: dict[tuple[str, Medium], set[int]] = {}
        for line in self.lines.values():
            waiting = deque(line.children.get(b"", {}).values())
            while waiting:
                held = waiting.popleft()
                if not held.announced:
                    continue
                for medium in _media(held.announced):
                    already = seen.setdefault((line.model, medium), set())
                    first = next((at for at, each in enumerate(held.chunk.hashes) if each not in already), -1)
                    already.update(held.chunk.hashes)
                    if first >= 0:
                        yield self._stored(line, held.chunk, medium, first)
                waiting.extend(line.children.get(held.chunk.digest, {}).values())

    # inside

    def _register(self, line: Line, chunk: Chunk, present: Sequence[bool]) -> None:
        held = _Held(chunk)
        for row, (prefix, here) in enumerate(zip(line.prefixes, present, strict=True)):
            key = prefix + chunk.digest
            for place in self._unnamed.pop(key, set()) | ({L1} if here else set()):
                held.rows[place] = held.rows.get(place, 0) | 1 << row
        if held.rows:
            line.held[chunk.digest] = held
            line.children.setdefault(chunk.parent, {})[chunk.digest] = held
            self._set_aside(line, held)
            self._settle(line, held)

    def _set_aside(self, line: Line, held: _Held) -> None:
        """Forget the oldest of too many chunks that are in tiers alone."""
        if L1 not in held.rows:
            self._aside[held] = line
            if len(self._aside) > MOST_ASIDE:
                oldest, of = next(iter(self._aside.items()))
                oldest.rows.clear()
                self._settle(of, oldest)
                self._remove(of, oldest)

    def _lack(self, line: Line, held: _Held, place: int, bits: int) -> None:
        rows = held.rows.get(place, 0) & ~bits
        if rows:
            held.rows[place] = rows
        else:
            held.rows.pop(place, None)
        self._settle(line, held)
        if not held.rows:
            self._remove(line, held)
        elif place == L1:
            self._set_aside(line, held)

    def _remove(self, line: Line, held: _Held) -> None:
        self._aside.pop(held, None)
        del line.held[held.chunk.digest]
        siblings = line.children[held.chunk.parent]
        del siblings[held.chunk.digest]
        if not siblings:
            del line.children[held.chunk.parent]
        if not line.held:
            self._unbind(line)

    def _drop(self, line: Line) -> None:
        for held in list(line.held.values()):
            held.rows.clear()
            self._aside.pop(held, None)
            self._settle(line, held)
        line.held.clear()
        line.children.clear()
        self._unbind(line)

    def _unbind(self, line: Line) -> None:
        self.lines.pop((line.namespace, line.salt), None)
        for prefix in line.prefixes:
            self._rows.pop(prefix, None)

    def _settle(self, line: Line, held: _Held) -> None:
        """Tell what has become a hit, and remove what has not remained one, of a chunk and its descendants."""
        waiting = [held]
        while waiting:
            each = waiting.pop()
            parent = each.chunk.parent
            before, now = each.announced, 0
            if not parent or (parent in line.held and line.held[parent].announced):
                for place, rows in each.rows.items():
                    if rows == line.whole:
                        now |= 1 << (Medium.CPU if place == L1 else Medium.STORAGE)
            if now == before:
                continue
            each.announced = now
            for medium in _media(now & ~before):
                self._announce(line, each.chunk, medium)
            for medium in _media(before & ~now):
                self._take_back(line, each.chunk, medium)
            if bool(now) != bool(before):
                waiting.extend(line.children.get(each.chunk.digest, {}).values())

    def _announce(self, line: Line, chunk: Chunk, medium: Medium) -> None:
        counts = self.counts.setdefault((line.model, medium), {})
        first = -1
        for at, each in enumerate(chunk.hashes):
            count = counts.get(each, 0)
            counts[each] = count + 1
            if not count and first < 0:
                first = at
        if first >= 0:
            self._news.append(self._stored(line, chunk, medium, first))

    def _take_back(self, line: Line, chunk: Chunk, medium: Medium) -> None:
        counts = self.counts[line.model, medium]
        gone = []
        for each in chunk.hashes:
            counts[each] -= 1
            if not counts[each]:
                del counts[each]
                gone.append(each)
        if gone:
            last = self._news[-1] if self._news else None
            if isinstance(last, Removed) and (last.model, last.medium) == (line.model, medium):
                last.hashes.extend(gone)
            else:
                self._news.append(Removed(line.model, medium, gone))

    def _stored(self, line: Line, chunk: Chunk, medium: Medium, first: int) -> Stored:
        parent: int | None = None
        if first:
            parent = chunk.hashes[first - 1]
        elif chunk.parent:
            parent = line.held[chunk.parent].chunk.hashes[-1]
        return Stored(line.model, line.namespace, line.salt, medium, chunk, first, parent)


def _media(bits: int) -> list[Medium]:
    return [medium for medium in Medium if bits >> medium & 1]
