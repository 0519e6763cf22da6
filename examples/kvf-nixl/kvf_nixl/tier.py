"""The tier in the helper process: a file for each value, under a name that appears once it is whole."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvf_nixl.transfers import Transfers
from kvframework.api.helper_tier import RegistersMemory
from kvframework.api.tier import Outcome, PackedKey, Tier
from kvframework.errors import TierError

_UNFINISHED = "unfinished"


class NixlTier(Tier, RegistersMemory):
    """Each value comes as one part, in registered memory. Thread-safe: each thread has an agent of its own, which knows
    the memory of that thread's calls."""

    name = "nixl"

    def __init__(self, path: str, *, where: str) -> None:
        self._path = path
        self._where = where
        self._own = threading.local()
        with self._files():
            os.makedirs(os.path.join(path, _UNFINISHED), mode=0o700, exist_ok=True)
            # Of helpers that were killed: there is one at a time.
            for name in os.listdir(os.path.join(path, _UNFINISHED)):
                os.unlink(os.path.join(path, _UNFINISHED, name))

    @property
    def _transfers(self) -> Transfers:
        if not hasattr(self._own, "transfers"):
            self._own.transfers = Transfers()
        transfers: Transfers = self._own.transfers
        return transfers

    def register_memory(self, memory: memoryview) -> None:
        self._transfers.register(memory)

    def unregister_memory(self, memory: memoryview) -> None:
        self._transfers.forget(memory)

    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        return [Outcome.FOUND if os.path.exists(self._file(key)) else Outcome.MISSING for key in keys]

    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        outcomes: list[int | Outcome] = []
        moved: dict[int, tuple[memoryview, int]] = {}
        with self._files(), ExitStack() as opened:
            for index, (key, (room,)) in enumerate(zip(keys, parts, strict=True)):
                try:
                    descriptor = os.open(self._file(key), os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    outcomes.append(Outcome.MISSING)
                    continue
                opened.callback(os.close, descriptor)
                nbytes = os.fstat(descriptor).st_size
                outcomes.append(nbytes if nbytes <= room.nbytes else Outcome.DAMAGED)
                if 0 < nbytes <= room.nbytes:
                    moved[index] = (room[:nbytes], descriptor)
            for index, is_whole in zip(moved, self._transfers.run("READ", [*moved.values()]), strict=True):
                if not is_whole:
                    outcomes[index] = Outcome.FAILED
        return outcomes

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        with self._files(), ExitStack() as opened:
            written: list[tuple[str, int]] = []
            for index, _ in enumerate(keys):
                name = os.path.join(self._path, _UNFINISHED, f"{threading.get_ident()}-{index}")
                descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                opened.callback(os.close, descriptor)
                written.append((name, descriptor))
            moved = {index: (room, written[index][1]) for index, (room,) in enumerate(parts) if room.nbytes}
            whole = dict(zip(moved, self._transfers.run("WRITE", [*moved.values()]), strict=True))
            return [
                self._finish(key, name, descriptor, room.nbytes) if whole.get(index, True) else self._drop(name)
                for index, (key, (name, descriptor), (room,)) in enumerate(zip(keys, written, parts, strict=True))
            ]

    def _finish(self, key: PackedKey, name: str, descriptor: int, nbytes: int) -> Outcome:
        if os.fstat(descriptor).st_size != nbytes:
            return self._drop(name)
        os.makedirs(os.path.dirname(self._file(key)), mode=0o700, exist_ok=True)
        os.replace(name, self._file(key))
        return Outcome.STORED

    def _drop(self, name: str) -> Outcome:
        os.unlink(name)
        return Outcome.FAILED

    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        outcomes = []
        with self._files():
            for key in keys:
                try:
                    os.unlink(self._file(key))
                    outcomes.append(Outcome.DELETED)
                except FileNotFoundError:
                    outcomes.append(Outcome.MISSING)
        return outcomes

    def close(self) -> None:
        pass

    @contextmanager
    def _files(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TierError(f"{error.filename or self._path}: {error.strerror}", where=self._where) from error

    def _file(self, key: PackedKey) -> str:
        return os.path.join(self._path, key[-1:].hex(), key.hex())
