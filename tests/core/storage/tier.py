"""A tier in memory that fails on demand: down, slow, stalled, lying, miscounting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvframework.api.tier import Outcome, PackedKey, Tier
from kvframework.errors import TierError
from kvframework.storage.namespaces import seal

T = TypeVar("T", bound="int | Outcome")


def in_envelope(key: PackedKey, value: bytes) -> bytes:
    """What a server puts into a tier."""
    return seal(key, [value], object_bytes=len(value)) + value


class MemoryTier(Tier):
    """Values in a dict, which outlives the tier when it is passed in. Faults are switched by plain attributes.

    `calls` lists what was asked, in order, as (operation, keys)."""

    name = "memory"
    has: frozenset[str] = frozenset()

    def __init__(self, values: dict[PackedKey, bytes] | None = None) -> None:
        self.values: dict[PackedKey, bytes] = {} if values is None else values
        self.calls: list[tuple[str, tuple[PackedKey, ...]]] = []
        self.down = False
        self.raises: Exception | None = None
        self.miscounts = False
        self.stubborn = False
        self.slow_s = 0.0
        self.max_bytes = 1 << 60
        self.lost: set[PackedKey] = set()
        self.refused: set[PackedKey] = set()
        self.stalled = 0
        self.closed = False
        self._stalling: set[str] = set()
        self._changed = threading.Condition()

    def capabilities(self) -> frozenset[str]:
        return self.has

    def stall(self, *operations: str) -> None:
        """From now on calls of these operations wait until `resume`, their deadline, or `close`."""
        with self._changed:
            self._stalling = set(operations)

    def resume(self) -> None:
        with self._changed:
            self._stalling = set()
            self._changed.notify_all()

    def asked(self, operation: str) -> list[PackedKey]:
        return [key for name, keys in self.calls if name == operation for key in keys]

    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        return self._answer(
            "contains", keys, deadline, lambda i: Outcome.FOUND if keys[i] in self.values else Outcome.MISSING
        )

    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        def get(index: int) -> int | Outcome:
            whole = value = self.values.get(keys[index])
            if whole is None or value is None or keys[index] in self.lost:
                return Outcome.MISSING
            if len(value) > sum(part.nbytes for part in parts[index]):
                return Outcome.DAMAGED
            for part in parts[index]:
                part[: len(value)], value = value[: part.nbytes], value[part.nbytes :]
            return len(whole)

        return self._answer("get", keys, deadline, get)

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        if sum(part.nbytes for each in parts for part in each) > self.max_bytes:
            raise TierError("too slow for so much before the deadline")

        def put(index: int) -> Outcome:
            if keys[index] in self.refused:
                return Outcome.FAILED
            self.values[keys[index]] = b"".join(parts[index])
            return Outcome.STORED

        return self._answer("put", keys, deadline, put)

    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        def delete(index: int) -> Outcome:
            return Outcome.MISSING if self.values.pop(keys[index], None) is None else Outcome.DELETED

        return self._answer("delete", keys, deadline, delete)

    def touch(self, keys: Sequence[PackedKey], *, deadline: float) -> None:
        self._answer("touch", keys, deadline, lambda _: Outcome.FOUND)

    def ping(self, *, deadline: float) -> None:
        self._answer("ping", (), deadline, lambda _: Outcome.FOUND)

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def _answer(self, operation: str, keys: Sequence[PackedKey], deadline: float, one: Callable[[int], T]) -> list[T]:
        self.calls.append((operation, tuple(keys)))
        with self._changed:
            self._changed.wait_for(lambda: self.closed, self.slow_s)
            self.stalled += 1
            while operation in self._stalling and (self.stubborn or not self.closed):
                if not self._changed.wait(None if self.stubborn else deadline - time.monotonic()):
                    break
            self.stalled -= 1
            if self.closed or self.down or time.monotonic() > deadline:
                raise TierError("the tier is closed, down, or too late")
        if self.raises is not None:
            raise self.raises
        outcomes = [one(index) for index in range(len(keys))]
        return outcomes[1:] if self.miscounts else outcomes
