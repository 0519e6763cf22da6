"""Doubles for storage tests: L1 memory that is a plain bytearray, and a small LRU that notices misuse."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from kvframework.api.eviction import EvictionPolicy, PackedKey
from kvframework.api.keys import ObjectKey
from kvframework.api.memory import Memory
from kvframework.storage.l1.entries import StoredObject
from kvframework.storage.l1.eviction_statistics import Cause
from kvframework.storage.l1.objects import ObjectTable

NAMESPACE = bytes(range(16))


class PlainMemory(Memory):
    """Ready at once. `close` raises `BufferError` while a view is left over, as a mapping does."""

    fd = -1

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.closed = False
        self._bytes = bytearray(capacity)

    def start(self, on_ready: Callable[[int], None]) -> None:
        on_ready(self.capacity)

    def view(self) -> memoryview:
        return memoryview(self._bytes)

    def close(self) -> None:
        self._bytes.clear()
        self.closed = True


class OrderedLru(EvictionPolicy):
    """Raises for calls that the contract excludes."""

    name = "test-lru"

    def __init__(self) -> None:
        self.order: OrderedDict[PackedKey, int] = OrderedDict()

    def on_insert(self, key: PackedKey, nbytes: int) -> None:
        assert key not in self.order
        self.order[key] = nbytes

    def on_access(self, key: PackedKey) -> None:
        self.order.move_to_end(key)

    def on_remove(self, key: PackedKey) -> None:
        del self.order[key]

    def victims(self) -> Iterator[PackedKey]:
        return iter(self.order)


class ClockedTable(ObjectTable):
    """An object table whose time is `now`; `left` is what left it since it was cleared."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.now = 0.0
        self.left: list[tuple[StoredObject, Cause]] = []
        super().__init__(*arguments, clock=lambda: self.now, **named)

    def on_removed(self, stored: StoredObject, cause: Cause, by: PackedKey | None) -> None:
        self.left.append((stored, cause))


def packed_key(number: int, *, namespace: bytes = NAMESPACE, salt: bytes = bytes(16)) -> PackedKey:
    return ObjectKey(namespace, salt, 0, 0, number.to_bytes(32, "big")).pack()


def content(key: PackedKey, nbytes: int) -> bytes:
    """The only right bytes of an object: they follow from its key, and no two keys share a window of them."""
    return (key[-8:] * (nbytes // 8 + 1))[:nbytes]
