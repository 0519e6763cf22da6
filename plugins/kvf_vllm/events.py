"""Owns what routers are told of the blocks that lie with the server: stored, and no longer there. Pure.

A server tells engines nothing of what it evicts: that something is gone is seen, and told, when a lookup misses what
this engine has announced. A server that is slow or away looks the same; whatever is found later is not announced again
until it is stored again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

MAX_ANNOUNCED = 1 << 20


@dataclass(frozen=True)
class BlocksStored:
    """`hashes` are vLLM's own, a hash for each `block_size` of `tokens`; `parent` is the one before the first."""

    hashes: Sequence[bytes]
    parent: bytes | None
    tokens: Sequence[int]
    block_size: int


@dataclass(frozen=True)
class BlocksRemoved:
    hashes: Sequence[bytes]


class Announcements:
    """`block_size` is that of vLLM's hashes, 0: nothing is announced. The oldest announcements are forgotten beyond
    `MAX_ANNOUNCED` blocks."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._announced: OrderedDict[bytes, None] = OrderedDict()
        self._events: list[BlocksStored | BlocksRemoved] = []

    def of(self, hashes: Sequence[bytes], tokens: Sequence[int], start: int, end: int) -> BlocksStored | None:
        """What is to be announced once tokens `[start, end)` of a request are stored."""
        size = self._block_size
        if not size or start % size or end % size or len(hashes) * size < end:
            return None
        parent = hashes[start // size - 1] if start else None
        return BlocksStored(list(hashes[start // size : end // size]), parent, list(tokens[start:end]), size)

    def stored(self, event: BlocksStored) -> None:
        self._events.append(event)
        for each in event.hashes:
            self._announced[each] = None
            self._announced.move_to_end(each)
        while len(self._announced) > MAX_ANNOUNCED:
            self._announced.popitem(last=False)

    def looked_up(self, hashes: Sequence[bytes], hit_end: int, end: int) -> None:
        """A lookup up to `end` found what lies before `hit_end`."""
        if not self._block_size or hit_end >= end:
            return
        span = hashes[-(-hit_end // self._block_size) : end // self._block_size]
        gone = [each for each in span if each in self._announced]
        for each in gone:
            del self._announced[each]
        if gone:
            self._events.append(BlocksRemoved(gone))

    def forget(self) -> None:
        """Nothing that was announced is found any more by this engine."""
        if self._announced:
            self._events.append(BlocksRemoved(list(self._announced)))
            self._announced.clear()

    def take(self) -> list[BlocksStored | BlocksRemoved]:
        """Since the last call."""
        events, self._events = self._events, []
        return events
