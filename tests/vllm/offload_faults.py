"""`KvFrameworkOffloading` with something wrong on purpose, as `tests.vllm.faults` has it for the other connector."""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
from pathlib import Path
from typing import Any

from kvf_vllm.offloading import worker
from kvf_vllm.offloading.connector import KvFrameworkOffloading
from tests.support.waiting import wait_until
from tests.vllm.engine import HALTED
from tests.vllm.faults import Counting, change_adapters_while_loaded, kill_server

_move = worker.move


def _zero(addresses: Any, runs: Any) -> None:
    for address, nbytes in zip(addresses.tolist(), runs.nbytes.tolist(), strict=True):
        ctypes.memset(address, 0, nbytes)


class Watched(Counting, KvFrameworkOffloading):
    pass


class WrongKv(Watched):
    """Zeros in place of what was loaded."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        def zeros(runs: Any, arena: Any, *, storing: bool) -> None:
            _move(runs, arena, storing=storing)
            if not storing:
                _zero(runs.engine, runs)

        worker.move = zeros
        super().register_kv_caches(kv_caches)


class ServerDiesBeforeLoad(Watched):
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._get_connector_metadata().load_jobs:
            kill_server()
        super().start_load_kv(forward_context, **kwargs)


class ServerDiesDuringLoad(Watched):
    """When the bytes have been copied, and before anybody knows that they were right."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        def killing(runs: Any, arena: Any, *, storing: bool) -> None:
            _move(runs, arena, storing=storing)
            if not storing:
                kill_server()

        worker.move = killing
        super().register_kv_caches(kv_caches)


class HaltsALoad(Watched):
    """Once, in the last worker, when the bytes are copied; what is written after the halt is wrong."""

    storing = False

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        parallel, folder = self._spec.config.parallel, Path(os.environ[HALTED])

        def halting(runs: Any, arena: Any, *, storing: bool) -> None:
            _move(runs, arena, storing=storing)
            if (folder / "halted").exists() or storing != self.storing or parallel.rank != parallel.world_size - 1:
                return
            (folder / "halted").touch()
            wait_until((folder / "over").exists, 300, "the end of the halt")
            base = ctypes.addressof(ctypes.c_char.from_buffer(arena.view))
            _zero(runs.arena + base if storing else runs.engine, runs)

        worker.move = halting


class HaltsAStore(HaltsALoad):
    storing = True


class AdapterChangesWhileLoaded(Watched):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        change_adapters_while_loaded()
        super().__init__(*arguments, **named)


class WrongKvFromTheSecondLoadOn(WrongKv):
    right = 1

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        wrong, loads = worker.move, itertools.count(1)

        def later(runs: Any, arena: Any, *, storing: bool) -> None:
            (_move if storing or next(loads) <= self.right else wrong)(runs, arena, storing=storing)

        worker.move = later


class WrongKvFromTheThirdLoadOn(WrongKvFromTheSecondLoadOn):
    right = 2


class RaisesOncePromised(Watched):
    """A promised load whose places cannot be named."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if self.connector_scheduler is not None:
            self._manager._numbers = _Broken(self._manager._numbers)


class _Broken:
    """Raises once, for the first load."""

    def __init__(self, numbers: Any) -> None:
        self._numbers = numbers
        self._is_broken = True

    def __next__(self) -> Any:
        if self._is_broken and sys._getframe(1).f_code.co_name == "prepare_load":
            self._is_broken = False
            raise RuntimeError("a promise that cannot be kept")
        return next(self._numbers)


class RaisesEverywhere(Watched):
    """The manager is broken once the engine has started."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if self.connector_scheduler is not None:
            for part, name in (
                ("searches", "_begin"),
                ("searches", "release"),
                ("engine", "prompt"),
                ("stores", "begin"),
            ):
                setattr(getattr(self._manager, part), name, _raise)


def _raise(*_arguments: Any, **_named: Any) -> None:
    raise RuntimeError("broken")
