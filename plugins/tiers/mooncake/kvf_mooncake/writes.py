"""How values are written: what is not there is put, what is there is replaced.

Mooncake's put says yes and writes nothing where the value is there, and also where another client is writing it, or has
died while it was. Its upsert ends the write of that other client, and the room for it is lost for ten minutes: nodes
that store the same prefix at the same moment would do this to each other. So what was put is looked for, and only what
does not appear is replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from kvf_mooncake.results import OK, REPLACED_MEANWHILE, check_master


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
