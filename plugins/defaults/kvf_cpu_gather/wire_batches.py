"""The batches of a transfer, and the limit of those under way at once. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvframework.api.transport import ArenaRange

BATCH_BYTES = 8 << 20
BATCH_OBJECTS = 1024
WINDOW_BYTES = 64 << 20
WINDOW_BATCHES = 4
_ALIGNMENT = 64

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """Whole objects that travel together; `offsets` has the place of each in `nbytes` of staging memory."""

    places: Sequence[ArenaRange]
    offsets: Sequence[int]
    nbytes: int


def batches(places: Sequence[ArenaRange]) -> Iterator[Batch]:
    """Cut in order: as many objects as are small enough together, at least one."""
    taken: list[ArenaRange] = []
    offsets: list[int] = []
    end = 0
    for place in places:
        size = -(-place.length // _ALIGNMENT) * _ALIGNMENT
        if taken and (end + size > BATCH_BYTES or len(taken) == BATCH_OBJECTS):
            yield Batch(taken, offsets, end)
            taken, offsets, end = [], [], 0
        taken.append(place)
        offsets.append(end)
        end += size
    if taken:
        yield Batch(taken, offsets, end)


class Window(Generic[T]):
    """The batches under way, oldest first: bounded in number and bytes, but two are always allowed, so that they
    overlap."""

    def __init__(self) -> None:
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return (item for item, _ in self._items)

    def has_room(self, nbytes: int) -> bool:
        count = len(self._items)
        return count < 2 or (count < WINDOW_BATCHES and self._bytes + nbytes <= WINDOW_BYTES)

    def add(self, item: T, nbytes: int) -> None:
        self._items.append((item, nbytes))
        self._bytes += nbytes

    def take_oldest(self) -> T:
        item, nbytes = self._items.popleft()
        self._bytes -= nbytes
        return item
