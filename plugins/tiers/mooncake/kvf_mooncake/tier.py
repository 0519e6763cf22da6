"""The tier's half in the helper process: one Mooncake client, which blocks for as long as it likes.

Every call may take longer than its deadline: then the server has long gone on, and kills this process.

How values are written to Mooncake, the seal behind each, and what its answers mean. What is not there is put, what
is there is replaced.

Mooncake's put says yes and writes nothing where the value is there, and also where another client is writing it, or has
died while it was. Its upsert ends the write of that other client, and the room for it is lost for ten minutes: nodes
that store the same prefix at the same moment would do this to each other. So what was put is looked for, and only what
does not appear is replaced.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import xxhash

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


OK = 0
NO_OBJECT = -704
# The object is being written, or its writer has died.
NOT_READY = -703
INVALID = -600
# Of a write: another client has begun to write the object, or has deleted it, since this one began.
REPLACED_MEANWHILE = frozenset({-601, NO_OBJECT})

_WORDS = {
    -1: "the setup failed",
    -200: "the memory of all peers is full",
    INVALID: "Mooncake refused an invalid parameter",
    -601: "another client replaced the object during the call",
    -700: "Mooncake refused an invalid write",
    -701: "Mooncake refused an invalid read",
    -702: "the copy of the object does not exist",
    NOT_READY: "the object is being written",
    NO_OBJECT: "the object does not exist",
    -705: "the object exists already",
    -706: "the object has a lease",
    -707: "the object's lease expired during the read",
    -800: "the peer that holds the object does not answer",
    -900: "the master does not answer",
    -901: "the master does not answer in time",
}
# At this and below, it is the master that failed, and not one key.
_MASTER = -900


def in_words(code: int) -> str:
    """What a code means, for an error's text."""
    return f"{_WORDS[code]} ({code})" if code in _WORDS else f"error {code}"


def check_master(codes: Sequence[int], count: int, where: str) -> Sequence[int]:
    """Return the codes, one for each of `count` keys. Raises `TierError` where the master did not answer."""
    if len(codes) != count:
        raise TierError(f"Mooncake answered {len(codes)} codes for {count} keys", where=where)
    if worst := min((code for code in codes if code <= _MASTER), default=0):
        raise TierError(in_words(worst), where=where)
    return codes


def of_contains(code: int) -> Outcome:
    return {1: Outcome.FOUND, 0: Outcome.MISSING}.get(code, Outcome.FAILED)


def of_put(code: int) -> Outcome:
    return Outcome.STORED if code == OK else Outcome.FAILED


def of_delete(code: int) -> Outcome:
    return {OK: Outcome.DELETED, NO_OBJECT: Outcome.MISSING}.get(code, Outcome.FAILED)


SEAL_BYTES = 8


def seal(key: PackedKey, room: memoryview) -> None:
    """Write the checksum of key and value into the last `SEAL_BYTES` of `room`, behind the value.

    Mooncake has no empty values. It overwrites a value in place while others read it, and gives the place of a deleted
    one to another: what was read meanwhile is of two values, which shows here.
    """
    room[-SEAL_BYTES:] = _checksum(key, room[:-SEAL_BYTES])


def broken_seal(key: PackedKey, kept: memoryview) -> bytes | None:
    """Return None for a value as it was kept whole, else the checksum of what is there instead of it."""
    if kept.nbytes < SEAL_BYTES:
        return bytes(kept)
    found = _checksum(key, kept[:-SEAL_BYTES])
    return None if found == kept[-SEAL_BYTES:] else found + bytes(kept[-SEAL_BYTES:])


def _checksum(key: PackedKey, value: memoryview) -> bytes:
    digest = xxhash.xxh3_64(key)
    digest.update(value)
    return digest.digest()


class Store(Protocol):
    """`mooncake.store.MooncakeDistributedStore`. Every method blocks, and answers codes."""

    def batch_is_exist(self, keys: list[str], /) -> list[int]: ...
    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int], /) -> list[int]: ...
    def batch_put_from(
        self, keys: list[str], addresses: list[int], sizes: list[int], config: object, /
    ) -> list[int]: ...
    def batch_upsert_from(
        self, keys: list[str], addresses: list[int], sizes: list[int], config: object, /
    ) -> list[int]: ...
    def batch_remove(self, keys: list[str], force: bool, /) -> list[int]: ...
    def get_size(self, key: str, /) -> int: ...
    def register_buffer(self, address: int, nbytes: int, /) -> int: ...
    def unregister_buffer(self, address: int, /) -> int: ...
    def close(self) -> int: ...


class Value(NamedTuple):
    """A value in registered memory."""

    name: str
    address: int
    nbytes: int


def write(store: Store, values: Sequence[Value], *, replication: object, until: float, where: str) -> list[int]:
    """Write values of different names; return Mooncake's code for each. Another client's write of the same name may
    end until the monotonic time `until`. `where` is for errors. Raises `TierError` where the master does not answer."""
    codes: dict[int, int] = {}

    def exist(chosen: Iterable[int]) -> set[int]:
        asked = list(chosen)
        found = store.batch_is_exist([values[index].name for index in asked]) if asked else []
        return {index for index, code in zip(asked, check_master(found, len(asked), where), strict=True) if code == 1}

    def send(call: Callable[[list[str], list[int], list[int], object], list[int]], chosen: Iterable[int]) -> None:
        if sent := list(chosen):
            names, addresses, sizes = map(list, zip(*(values[index] for index in sent), strict=True))
            answered = call(names, addresses, sizes, replication)
            codes.update(zip(sent, check_master(answered, len(sent), where), strict=True))

    every = range(len(values))
    there = exist(every)
    send(store.batch_upsert_from, there)
    left = [index for index in every if index not in there or codes[index] in REPLACED_MEANWHILE]
    while left:
        send(store.batch_put_from, left)
        there = exist(index for index in left if codes[index] == OK)
        left = [
            index for index in left if codes[index] in REPLACED_MEANWHILE or (codes[index] == OK and index not in there)
        ]
        if left and time.monotonic() > until:
            send(store.batch_upsert_from, left)
            break
        if left:
            time.sleep(_POLL_S)
    return [codes[index] for index in every]
