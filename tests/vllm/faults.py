"""The connector under test with something wrong on purpose, selected like any connector. Runs in vLLM's processes; the
environment says what there is to do.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from kvf_vllm.connector import KvFrameworkConnector
from kvframework.api.futures import Future
from kvframework.api.transport import LoadOutcome
from kvframework.client import KVClient
from tests.vllm.engine import SERVER_PID, STEPS


class Counting:
    """Writes down how many tokens each step computes."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            with Path(os.environ[STEPS]).open("a") as steps:
                steps.write(f"{scheduler_output.total_num_scheduled_tokens}\n")
        return super().build_connector_meta(scheduler_output)  # type: ignore[misc]


class Watched(Counting, KvFrameworkConnector):
    pass


class WrongKv(Watched):
    """What was loaded is changed before it is used."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        for op in self._get_connector_metadata().plan.loads:
            for tensor in self._instance._tensors.values():
                for blocks in op.block_ids:
                    tensor[blocks] = -tensor[blocks]


class WrongKvFromTheSecondLoadOn(WrongKv):
    """The loads before are right."""

    right = 1

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.right -= len(self._get_connector_metadata().plan.loads)
        (super(WrongKv, self) if self.right >= 0 else super()).start_load_kv(forward_context, **kwargs)


class WrongKvFromTheThirdLoadOn(WrongKvFromTheSecondLoadOn):
    right = 2


class WithoutStatesTheSecondTime(Watched):
    """From the second load on the blocks of recurrent states are left empty, as vLLM hands them out."""

    _loads = 0

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        for op in self._get_connector_metadata().plan.loads:
            self._loads += 1
            if self._loads == 1:
                continue
            for group, blocks in zip(self._groups, op.block_ids, strict=True):
                for layer in group.layers if group.state else ():
                    self._instance._tensors[layer][blocks[-1]] = 0


class ServerDiesBeforeLoad(Watched):
    """Between the lookup that promised a hit and the load."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._get_connector_metadata().plan.loads:
            kill_server()
        super().start_load_kv(forward_context, **kwargs)


class ServerDiesDuringLoad(Watched):
    """When the bytes have been copied, and before the server says that they were right."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loaded = KVClient._loaded

        def killed_first(client: KVClient, *arguments: Any) -> Future[LoadOutcome]:
            kill_server()
            return loaded(client, *arguments)

        KVClient._loaded = killed_first  # type: ignore[method-assign]
        try:
            super().start_load_kv(forward_context, **kwargs)
        finally:
            KVClient._loaded = loaded  # type: ignore[method-assign]


class RaisesOncePromised(Watched):
    """A promised load that the scheduler's side cannot name."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if self._scheduler is not None:
            allocated = self._scheduler.allocated

            def raising(request: Any, table: Any, external: int) -> None:
                if external:
                    raise RuntimeError("a promise that cannot be kept")
                allocated(request, table, external)

            self._scheduler.allocated = raising  # type: ignore[method-assign]


class AdapterChangesWhileLoaded(Watched):
    """Somebody writes to an adapter's files while vLLM reads them."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        change_adapters_while_loaded()
        super().register_kv_caches(kv_caches)


def change_adapters_while_loaded() -> None:
    from vllm.lora.worker_manager import WorkerLoRAManager

    load = WorkerLoRAManager._load_adapter

    def disturbed(manager: Any, request: Any) -> Any:
        adapter = load(manager, request)
        with (Path(request.lora_path) / "adapter_config.json").open("a") as config:
            config.write("\n")
        return adapter

    WorkerLoRAManager._load_adapter = disturbed


class Broken:
    """A side that raises whatever is asked of it; it counts and closes."""

    def __init__(self, sound: Any) -> None:
        self.tally = sound.tally
        self.close = sound.close

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} here")


class RaisesEverywhere(Watched):
    """Both sides are broken once the engine has started."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if self._scheduler is not None:
            self._scheduler = Broken(self._scheduler)  # type: ignore[assignment]

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        self._worker = Broken(self._worker)  # type: ignore[assignment]


def kill_server() -> None:
    pid = int(os.environ[SERVER_PID])
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    # Until it is reaped it may still look alive; its sockets are closed once it is a zombie without other threads.
    process = Path(f"/proc/{pid}")
    while process.exists():
        is_zombie = (process / "stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
        if is_zombie and len(list((process / "task").iterdir())) == 1:
            return


class InPieces(Watched):
    """Writes down each step that computes and leaves a load for the next ones."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        if self._get_connector_metadata().plan.computes and self._worker._loading:
            self.left_something()

    def left_something(self) -> None:
        with Path(os.environ[STEPS] + ".loading").open("a") as steps:
            steps.write("1\n")


class InSmallestPieces(InPieces):
    """As if an engine knew nothing of its speed."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker._pace.room = self._none
        super().start_load_kv(forward_context, **kwargs)

    def _none(self, *, computes: bool) -> int:
        return 0


class ServerDiesBetweenPieces(InPieces):
    def left_something(self) -> None:
        super().left_something()
        kill_server()
