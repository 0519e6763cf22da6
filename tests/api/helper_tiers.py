"""Tiers made in a helper process: one that works, and one whose calls go wrong as the first byte of a key says."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence

from kvf_filesystem import FilesystemOptions
from kvf_filesystem.tier import open_tier
from kvframework.api.tier import Outcome, Tier
from kvframework.errors import TierError


def filesystem(path: str) -> Tier:
    return open_tier(FilesystemOptions(path=path), where="[[l2]] #1")


def unmakeable() -> Tier:
    raise ValueError("no library here")


class Wrong(Tier):
    """FOUND for every key that asks for nothing else."""

    name = "wrong"

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
