"""The worker's half: copies between vLLM's blocks and the arena, and what becomes of jobs that fail.

On a CPU a thread copies. A load is good only if the arena was served, and the pins held, until its copy had ended; a
store that is not whole is not published.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from kvf_vllm.adapters import LoadedAdapters
from kvf_vllm.offloading.copies import Runs, Slot
from kvf_vllm.offloading.messages import ArenaPlaces, StepPlan, StepReport
from kvframework.client import ArenaTicket, MappedArena, map_arena
from kvframework.errors import KVFrameworkError

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

log = logging.getLogger(__name__)

# The time before the end of its pins at which a load is given up: it might not end in time.
SPARE_S = 0.5
# How long a worker waits for the arena, and until it asks again.
MAP_S, AGAIN_S = 1.0, 10.0


class ServedArena:
    """The arena of the server with which the scheduler has a session, mapped in this worker as a part of that."""

    def __init__(self, map_it: Callable[[ArenaTicket, float], MappedArena] = map_arena) -> None:
        self._map = map_it
        self._ticket: ArenaTicket | None = None
        self._arena: MappedArena | None = None
        self._again = 0.0

    def follow(self, ticket: ArenaTicket | None) -> None:
        """Map the arena of a new server, or of a new session. Blocks for the time that a server takes to answer."""
        now = time.monotonic()
        if ticket == self._ticket and (self._arena is not None or now < self._again):
            return
        self._arena, self._ticket, self._again = None, ticket, now + AGAIN_S
        if ticket is None:
            return
        try:
            self._arena = self._map(ticket, MAP_S)
        except (KVFrameworkError, OSError) as error:
            log.warning("this worker cannot map the server's arena, it moves no KV: %s", error)

    def of(self, boot_id: bytes) -> MappedArena | None:
        """Return the arena of that start of a server, if it is mapped and served."""
        arena, ticket = self._arena, self._ticket
        served = arena is not None and ticket is not None and ticket.boot_id == boot_id and arena.is_served
        return arena if served else None


@dataclass
class _Job:
    job_id: int
    blocks: GPULoadStoreSpec
    places: ArenaPlaces
    storing: bool


class CpuWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies in a thread of its own, in the order of the jobs. See `OffloadingWorker`."""

    def __init__(self, slot: Slot, arena: ServedArena) -> None:
        self._slot = slot
        self._arena = arena
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._ended: deque[TransferResult] = deque()
        self._open: set[int] = set()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvf-offload", daemon=True)
        self._thread.start()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: ArenaPlaces) -> bool:
        return self._submit(_Job(job_id, src_spec, dst_spec, storing=True))

    def submit_load(self, job_id: int, src_spec: ArenaPlaces, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(_Job(job_id, dst_spec, src_spec, storing=False))

    def get_finished(self) -> list[TransferResult]:
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def wait(self, job_ids: set[int]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._open.isdisjoint(job_ids))

    def shutdown(self) -> None:
        """End the thread after the jobs that it has."""
        self._queue.put(None)
        self._thread.join()

    def _submit(self, job: _Job) -> bool:
        with self._changed:
            self._open.add(job.job_id)
        self._queue.put(job)
        return True

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            began, copied = time.monotonic(), None
            try:
                copied = self._copy(job)
            except Exception:
                log.exception("a copy of KV failed")
            took_s = time.monotonic() - began
            self._ended.append(TransferResult(job.job_id, copied is not None, copied, took_s))
            with self._changed:
                self._open.discard(job.job_id)
                self._changed.notify_all()

    def _copy(self, job: _Job) -> int | None:
        """Copy the blocks of a job; return the bytes, None if it is not whole."""
        arena = self._arena.of(job.places.boot_id)
        if arena is None or time.monotonic() > job.places.until - SPARE_S:
            return None
        if not job.storing and min(job.places.offsets, default=0) < 0:
            return None
        runs = self._slot.runs(job.blocks, job.places.offsets)
        _check(runs, arena)
        move(runs, arena, storing=job.storing)
        # Otherwise the place may have been another's while it was copied.
        return runs.total if arena.is_served and time.monotonic() < job.places.until else None


def _check(runs: Runs, arena: MappedArena) -> None:
    if len(runs.arena) and int((runs.arena + runs.nbytes).max()) > arena.view.nbytes:
        raise ValueError(f"a place behind the arena's {arena.view.nbytes} bytes")


def move(runs: Runs, arena: MappedArena, *, storing: bool) -> None:
    """Copy the runs, one after the other. Blocks, without the interpreter's lock while bytes are copied."""
    base = ctypes.addressof(ctypes.c_char.from_buffer(arena.view))
    engine, places, sizes = runs.engine.tolist(), (runs.arena + base).tolist(), runs.nbytes.tolist()
    targets, sources = (places, engine) if storing else (engine, places)
    memmove = ctypes.memmove
    for target, source, nbytes in zip(targets, sources, sizes, strict=True):
        memmove(target, source, nbytes)


class WorkerSide(OffloadingConnectorWorker):  # type: ignore[misc]
    """vLLM's worker side, which knows no job that fails: here a load that fails is reported, and vLLM computes."""

    def __init__(
        self,
        spec: Any,
        vllm_config: Any,
        kv_cache_config: Any,
        arena: ServedArena,
        adapters: LoadedAdapters,
    ) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._connector_worker_meta = StepReport()
        self._arena = arena
        self._adapters = adapters
        self._spoils_base = False
        self._at_once = bool(current_platform.is_cpu())
        # The numbers of stores under way, by job.
        self._numbers: dict[int, int] = {}
        self.failed_loads: set[str] = set()

    def report_packing(self, packing: str) -> None:
        self._connector_worker_meta.packings[self.spec.config.parallel.rank] = packing

    def start_kv_transfers(self, metadata: StepPlan) -> None:
        self._arena.follow(metadata.arena)
        super().start_kv_transfers(metadata)

    def handle_preemptions(self, metadata: StepPlan) -> None:
        self._arena.follow(metadata.arena)
        self._know(metadata)
        super().handle_preemptions(metadata)

    def prepare_store_kv(self, metadata: StepPlan) -> None:
        """Plan the stores of a step, which vLLM begins with the next one. The forward pass of a CPU has ended here, and
        its blocks are complete: they are stored at once."""
        self._know(metadata)
        super().prepare_store_kv(metadata)
        if not self._at_once:
            return
        for job_id, blocks, places in self._unsubmitted_store_jobs:
            self.worker.submit_store(job_id, blocks, places)
        self._unsubmitted_store_jobs.clear()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        finished: set[str] = set()
        report = self._connector_worker_meta
        for result in self.worker.get_finished():
            request_id = self._load_jobs.pop(result.job_id, None)
            stats = report.transfer_stats.store if request_id is None else report.transfer_stats.load
            if result.success and result.transfer_size is not None and result.transfer_time is not None:
                stats.record(result.transfer_size, result.transfer_time)
            report.mark_completed(result.job_id)
            if request_id is not None:
                finished.add(request_id)
                if not result.success:
                    self.failed_loads.add(request_id)
            elif result.job_id in self._numbers:
                number = self._numbers.pop(result.job_id)
                report.ended[number] += 1
                if not result.success:
                    report.failed.add(number)
        return set(), finished

    def build_connector_worker_meta(self) -> StepReport | None:
        report, rank = self._connector_worker_meta, self.spec.config.parallel.rank
        if news := self._adapters.take_news():
            report.adapters[rank] = news
        if self._adapters.spoils_base() and not self._spoils_base:
            self._spoils_base = report.spoils_base = True
        if not report.says_anything:
            return None
        self._connector_worker_meta = StepReport()
        return report

    def _know(self, metadata: StepPlan) -> None:
        for job_id, job in metadata.store_jobs.items():
            if self._is_store_writer:
                self._numbers[job_id] = job.dst_spec.number
            else:
                self._connector_worker_meta.ended[job.dst_spec.number] += 1
