"""How values are written to Mooncake, the seal behind each, and what its answers mean. What is not there is put, what
is there is replaced.

Mooncake's put says yes and writes nothing where the value is there, and also where another client is writing it, or has
died while it was. Its upsert ends the write of that other client, and the room for it is lost for ten minutes: nodes
that store the same prefix at the same moment would do this to each other. So what was put is looked for, and only what
does not appear is replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import xxhash

from kvframework.api.keys import PackedKey
from kvframework.api.tier import Outcome
from kvframework.errors import TierError

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
    """`mooncake.store.MooncakeDistributedStore`. Every method blocks, and answers codes (`results.py`)."""

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


_POLL_S = 0.005


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
