"""The tier's half in the helper process: one Mooncake client, which blocks for as long as it likes.

Every call may take longer than its deadline: then the server has long gone on, and kills this process.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvf_mooncake.writes import (
    INVALID,
    NO_OBJECT,
    NOT_READY,
    SEAL_BYTES,
    Store,
    Value,
    broken_seal,
    check_master,
    in_words,
    of_contains,
    of_delete,
    of_put,
    seal,
    write,
)
from kvframework.api.helper_tier import RegistersMemory
from kvframework.api.tier import Outcome, PackedKey, Tier
from kvframework.errors import TierError


class ChangingKeys:
    """Thread-safe. A call waits for those that change one of its keys, for as long as they take."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._keys: set[PackedKey] = set()

    @contextmanager
    def alone(self, keys: Sequence[PackedKey]) -> Iterator[None]:
        """Have these keys for one call."""
        wanted = set(keys)
        with self._changed:
            self._changed.wait_for(lambda: not wanted & self._keys)
            self._keys |= wanted
        try:
            yield
        finally:
            with self._changed:
                self._keys -= wanted
                self._changed.notify_all()


# How long a reader or a writer waits for the end of another write, which its writer's death may have cut off.
_WRITE_UNDER_WAY_S = 0.5
_POLL_S = 0.005


class MooncakeTier(Tier, RegistersMemory):
    """Values in the segments of the peers. Each value comes as one part, with `SEAL_BYTES` of room behind it.
    Thread-safe, as the client is. `replication` is passed on to it."""

    name = "mooncake"

    def __init__(self, store: Store, replication: object, *, prefix: str, where: str) -> None:
        self._store = store
        self._replication = replication
        self._prefix = prefix
        self._where = where
        self._changing = ChangingKeys()

    def register_memory(self, memory: memoryview) -> None:
        if code := self._store.register_buffer(_address(memory), memory.nbytes):
            raise TierError(
                f"{memory.nbytes} bytes of memory cannot be registered with Mooncake: {in_words(code)}",
                where=self._where,
            )

    def unregister_memory(self, memory: memoryview) -> None:
        self._store.unregister_buffer(_address(memory))

    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        codes = self._store.batch_is_exist(self._names(keys)) if keys else []
        return [of_contains(code) for code in self._checked(codes, len(keys))]

    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        # One buffer a key at a time: of several, Mooncake fills the last, and answers as if it had filled all.
        rooms = [room for (room,) in parts]
        until = min(deadline, time.monotonic() + _WRITE_UNDER_WAY_S)
        outcomes: list[int | Outcome] = [Outcome.FAILED] * len(keys)
        broken: dict[int, bytes] = {}
        left = list(range(len(keys)))
        while left:
            asked = [*{keys[index]: index for index in reversed(left)}.values()]
            codes = self._store.batch_get_into(
                self._names([keys[index] for index in asked]),
                [_address(rooms[index]) for index in asked],
                [rooms[index].nbytes for index in asked],
            )
            again = set()
            for index, code in zip(asked, self._checked(codes, len(asked)), strict=True):
                if code == NOT_READY:
                    outcomes[index] = Outcome.MISSING
                    again.add(index)
                elif code >= 0 and (seal_found := broken_seal(keys[index], rooms[index][:code])) is not None:
                    outcomes[index] = Outcome.DAMAGED if broken.get(index) == seal_found else Outcome.MISSING
                    broken[index] = seal_found
                    again.add(index)
                else:
                    outcomes[index] = self._received(keys[index], rooms[index], code)
            if again and time.monotonic() > until:
                again.clear()
            elif again:
                time.sleep(_POLL_S)
            left = [index for index in left if index in again or index not in asked]
        return outcomes

    def _received(self, key: PackedKey, room: memoryview, code: int) -> int | Outcome:
        if code >= 0:
            return code - SEAL_BYTES
        if code == INVALID and self._store.get_size(self._name(key)) > room.nbytes:
            return Outcome.DAMAGED
        return Outcome.MISSING if code == NO_OBJECT else Outcome.FAILED

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        rooms = [room for (room,) in parts]
        for key, room in zip(keys, rooms, strict=True):
            seal(key, room)
        codes: list[int] = []
        for first, end in _without_repeats(keys):
            with self._changing.alone(keys[first:end]):
                codes += write(
                    self._store,
                    [
                        Value(self._name(key), _address(room), room.nbytes)
                        for key, room in zip(keys[first:end], rooms[first:end], strict=True)
                    ],
                    replication=self._replication,
                    until=time.monotonic() + _WRITE_UNDER_WAY_S,
                    where=self._where,
                )
        return [of_put(code) for code in codes]

    def _checked(self, codes: Sequence[int], count: int) -> Sequence[int]:
        return check_master(codes, count, self._where)

    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        # By force: without it, what anyone has read or asked for within the last seconds stays.
        with self._changing.alone(keys):
            codes = self._store.batch_remove(self._names(keys), True) if keys else []
        return [of_delete(code) for code in self._checked(codes, len(keys))]

    def close(self) -> None:
        self._store.close()

    def _names(self, keys: Sequence[PackedKey]) -> list[str]:
        return [self._name(key) for key in keys]

    def _name(self, key: PackedKey) -> str:
        return self._prefix + key.hex()


def _without_repeats(keys: Sequence[PackedKey]) -> Iterator[tuple[int, int]]:
    """The bounds of stretches that have no key twice: what is in one may be written in any order."""
    first, seen = 0, set[PackedKey]()
    for index, key in enumerate(keys):
        if key in seen:
            yield first, index
            first, seen = index, set()
        seen.add(key)
    if first < len(keys):
        yield first, len(keys)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
