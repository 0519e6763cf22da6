"""Tiers made in a helper process: one that works, and one whose calls go wrong as the first byte of a key says."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence

from kvf_filesystem import FilesystemOptions
from kvf_filesystem.tier import open_tier
from kvframework.api.helper_tier import RegistersMemory
from kvframework.api.plugin import NoOptions, Options
from kvframework.api.tier import Outcome, Tier
from kvframework.errors import TierError


def filesystem(options: FilesystemOptions, where: str) -> Tier:
    return open_tier(options, where=where)


def refused(options: NoOptions, where: str) -> Tier:
    raise TierError("no store here", where=where, hint="start it")


def unmakeable(options: NoOptions, where: str) -> Tier:
    raise ValueError("no library here")


class SlowOptions(Options, frozen=True):
    path: str
    """A file that lets the tier be made once it is there."""


def slow(options: SlowOptions, where: str) -> Tier:
    while not os.path.exists(options.path):
        time.sleep(0.01)
    return Wrong(NoOptions(), where)


class Wrong(Tier):
    """FOUND for every key that asks for nothing else."""

    name = "wrong"

    def __init__(self, options: NoOptions, where: str) -> None:
        pass

    def contains(self, keys: Sequence[bytes], *, deadline: float) -> list[Outcome]:
        deed = keys[0][:1]
        if deed == b"h":
            ctypes.PyDLL(None).sleep(600)  # and holds the interpreter
        elif deed == b"s":
            time.sleep(600)
        elif deed == b"d":
            os._exit(3)
        elif deed == b"r":
            raise TierError("refused", where="there", available="nothing", hint="ask again")
        elif deed == b"b":
            raise KeyError("a bug")
        return [Outcome.FOUND] * len(keys)

    def get_into(
        self, keys: Sequence[bytes], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        return [Outcome.MISSING for _ in keys]

    def put(self, keys: Sequence[bytes], parts: Sequence[Sequence[memoryview]], *, deadline: float) -> list[Outcome]:
        return [Outcome.FAILED for _ in keys]

    def delete(self, keys: Sequence[bytes], *, deadline: float) -> list[Outcome]:
        return [Outcome.MISSING for _ in keys]

    def close(self) -> None:
        return


class Registering(Wrong, RegistersMemory):
    """Says of each value how many bytes of registered memory it is in, and answers what the last registration was."""

    def __init__(self, options: NoOptions, where: str) -> None:
        self._memories: dict[int, int] = {}

    def register_memory(self, memory: memoryview) -> None:
        if memory.nbytes > 8 << 20:
            raise TierError("too much to register", where="there")
        self._memories[_address(memory)] = memory.nbytes

    def unregister_memory(self, memory: memoryview) -> None:
        del self._memories[_address(memory)]

    def put(self, keys: Sequence[bytes], parts: Sequence[Sequence[memoryview]], *, deadline: float) -> list[Outcome]:
        return [Outcome.STORED if self._has(part) else Outcome.FAILED for (part,) in parts]

    def _has(self, part: memoryview) -> bool:
        at = _address(part)
        return any(start <= at and at + part.nbytes <= start + nbytes for start, nbytes in self._memories.items())


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Late(Wrong):
    """Fills the parts of a `get_into` at once, and again and again for seconds, whatever the deadline."""

    def get_into(
        self, keys: Sequence[bytes], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        for _ in range(600):
            for (part,) in parts:
                part[:] = b"!" * part.nbytes
            time.sleep(0.01)
        return [0] * len(keys)
