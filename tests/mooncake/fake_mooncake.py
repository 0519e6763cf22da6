"""A Mooncake client without a store: its codes, its leases of nothing, and the ways in which it goes wrong."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence

from kvf_mooncake import MooncakeOptions
from kvf_mooncake.tier import MooncakeTier

FULL, INVALID, NOT_READY, MISSING, DEAD_PEER, NO_MASTER = -200, -600, -703, -704, -800, -900


class FakeClient:
    """Values in a dict. `codes` are answers for keys that end in these texts, `unfinished` are keys that
    another client is writing; `before_get` runs before each get, `before_put` before each put."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.codes: dict[str, int] = {}
        self.registered: dict[int, int] = {}
        self.unfinished: set[str] = set()
        self.before_get: Callable[[], None] = lambda: None
        self.before_put: Callable[[], None] = lambda: None
        self.puts: list[list[str]] = []
        self.closed = 0

    def _code(self, key: str) -> int:
        return next((code for end, code in self.codes.items() if key.endswith(end)), 0)

    def batch_is_exist(self, keys: Sequence[str], /) -> list[int]:
        return [self._code(key) or int(key in self.values) for key in keys]

    def batch_get_into(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], /) -> list[int]:
        """Of a key that is asked for twice, the last buffer is filled alone: as Mooncake has it."""
        self.before_get()
        last = {key: index for index, key in enumerate(keys)}
        return [
            self._get(key, address if last[key] == index else None, size)
            for index, (key, address, size) in enumerate(zip(keys, addresses, sizes, strict=True))
        ]

    def _get(self, key: str, address: int | None, size: int) -> int:
        value = self.values.get(key)
        if key in self.unfinished:
            return NOT_READY
        if code := self._code(key):
            return code
        if value is None:
            return MISSING
        if len(value) > size:
            return INVALID
        if address is not None:
            ctypes.memmove(address, value, len(value))
        return len(value)

    def batch_put_from(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], config: object, /
    ) -> list[int]:
        """What is there or unfinished stays, and the answer is that of a success."""
        self.before_put()
        absent = [key not in self.values and key not in self.unfinished for key in keys]
        new = [
            each for each, is_absent in zip(zip(keys, addresses, sizes, strict=True), absent, strict=True) if is_absent
        ]
        written = iter(self.batch_upsert_from(*zip(*new, strict=True), config) if new else [])
        return [next(written) if is_absent else 0 for is_absent in absent]

    def batch_upsert_from(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], config: object, /
    ) -> list[int]:
        self.puts.append(list(keys))
        codes = [self._code(key) if size else INVALID for key, size in zip(keys, sizes, strict=True)]
        for key, address, size, code in zip(keys, addresses, sizes, codes, strict=True):
            if not code:
                self.values[key] = ctypes.string_at(address, size)
                self.unfinished.discard(key)
        return codes

    def batch_remove(self, keys: Sequence[str], force: bool, /) -> list[int]:
        return [self._code(key) or (0 if force and self.values.pop(key, None) is not None else MISSING) for key in keys]

    def get_size(self, key: str, /) -> int:
        return len(self.values[key]) if key in self.values else MISSING

    def register_buffer(self, address: int, nbytes: int, /) -> int:
        self.registered[address] = nbytes
        return 0

    def unregister_buffer(self, address: int, /) -> int:
        return 0 if self.registered.pop(address, None) else INVALID

    def close(self) -> int:
        self.closed += 1
        return 0


def fake_tier(options: MooncakeOptions, where: str) -> MooncakeTier:
    """What a helper process makes instead of the tier."""
    return MooncakeTier(FakeClient(), None, prefix=options.prefix, where=where)


class Holding(FakeClient):
    """A client that holds the interpreter, as Mooncake's does while no master answers."""

    def batch_is_exist(self, keys: Sequence[str], /) -> list[int]:
        ctypes.PyDLL(None).sleep(600)
        return []


def holding_tier(options: MooncakeOptions, where: str) -> MooncakeTier:
    return MooncakeTier(Holding(), None, prefix=options.prefix, where=where)


def after(seconds: float) -> float:
    return time.monotonic() + seconds
