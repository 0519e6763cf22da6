"""`KvFrameworkOffloading` with something wrong on purpose, as `tests.vllm.faults` has it for the other connector."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from kvf_vllm.offloading import worker
from kvf_vllm.offloading.connector import KvFrameworkOffloading
from tests.vllm.engine import STEPS
from tests.vllm.faults import kill_server

_move = worker.move


class Watched(KvFrameworkOffloading):
    """Writes down how many tokens each step computes."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            with Path(os.environ[STEPS]).open("a") as steps:
                steps.write(f"{scheduler_output.total_num_scheduled_tokens}\n")
        return super().build_connector_meta(scheduler_output)


class WrongKv(Watched):
    """Zeros in place of what was loaded."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        def zeros(runs: Any, arena: Any, *, storing: bool) -> None:
            _move(runs, arena, storing=storing)
            for address, nbytes in zip(runs.engine.tolist(), runs.nbytes.tolist(), strict=True):
                if not storing:
                    ctypes.memset(address, 0, nbytes)

        worker.move = zeros
        super().register_kv_caches(kv_caches)


class ServerDiesBeforeLoad(Watched):
    """Between the lookup that promised a hit and the load."""

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


class RaisesEverywhere(Watched):
    """The manager is broken once the engine has started."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if self.connector_scheduler is not None:
            for name in ("_begin", "_prompt", "_release", "_grouped"):
                setattr(self._manager, name, _raise)


def _raise(*_arguments: Any, **_named: Any) -> None:
    raise RuntimeError("broken")
