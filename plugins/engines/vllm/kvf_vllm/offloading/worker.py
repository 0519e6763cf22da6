"""The worker's half: copies between vLLM's blocks and the arena, and what becomes of jobs that fail.

On a CPU threads copy. A load is good only if the arena was served, and the pins held, until its copy had ended; a
store that is not whole is not published.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from kvf_vllm.adapters import LoadedAdapters
from kvf_vllm.offloading.copies import Runs, Slot
from kvf_vllm.offloading.messages import ArenaPlaces, Laid, StepPlan, StepReport
from kvf_vllm.tally import Tally
from kvf_vllm.weights import WorkerWeights
from kvframework.api.futures import Promise
from kvframework.client import ArenaTicket, KvIdentity, MappedArena, map_arena
from kvframework.errors import KVFrameworkError

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

log = logging.getLogger(__name__)

# The time before the end of its pins at which a load is given up: it might not end in time.
SPARE_S = 0.5
# How long a worker waits for the arena, and until it asks again.
MAP_S, AGAIN_S = 1.0, 10.0
# How often it is looked whether the arena is still served.
WATCH_S = 1.0


class ServedArena:
    """The arena of the server with which the scheduler has a session, mapped in this worker as a part of that. A thread
    lets go of it once the session has ended: an idle engine must not keep the memory of a server that is gone."""

    def __init__(self, map_it: Callable[[ArenaTicket, float], MappedArena] = map_arena) -> None:
        self._map = map_it
        self._asked: ArenaTicket | None = None
        self._again = 0.0
        # With the session that it is a part of.
        self._mapped: tuple[bytes, MappedArena] | None = None

    def follow(self, ticket: ArenaTicket | None) -> None:
        """Map the arena of a new session; without a ticket, from a server in doubt, stay with the last one. Blocks for
        the time that a server takes to answer."""
        now, mapped = time.monotonic(), self._mapped
        if ticket is None or (mapped is not None and mapped[0] == ticket.session):
            return
        # The last session lasts as long as any of its processes has the arena mapped.
        self._mapped = mapped = None
        if ticket == self._asked and now < self._again:
            return
        self._asked, self._again = ticket, now + AGAIN_S
        try:
            arena = self._map(ticket, MAP_S)
        except (KVFrameworkError, OSError) as error:
            log.warning("this worker moves no KV, because it cannot map the server's memory: %s", error)
            return
        self._mapped = ticket.session, arena
        arena.map_ahead()
        threading.Thread(target=self._watch, args=(weakref.ref(arena),), name="kvf-arena", daemon=True).start()

    def of(self, session: bytes) -> MappedArena | None:
        """Return the arena of that session, if it is mapped and served: places of another one may be anybody's now."""
        mapped = self._mapped
        return mapped[1] if mapped is not None and mapped[0] == session and mapped[1].is_served else None

    def _watch(self, reference: weakref.ref[MappedArena]) -> None:
        while (arena := reference()) is not None and arena.is_served:
            del arena
            time.sleep(WATCH_S)
        mapped = self._mapped
        if arena is not None and mapped is not None and mapped[1] is arena:
            self._mapped = None


@dataclass
class _Job:
    job_id: int
    blocks: GPULoadStoreSpec
    places: ArenaPlaces
    storing: bool


class CpuWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies in two threads: a load waits for no store. See `OffloadingWorker`."""

    def __init__(self, slot: Slot, arena: ServedArena) -> None:
        self._slot = slot
        self._arena = arena
        self._threads = ThreadPoolExecutor(1, "kvf-load"), ThreadPoolExecutor(1, "kvf-store")
        self._ended: deque[TransferResult] = deque()
        self._open: set[int] = set()
        self._changed = threading.Condition()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: ArenaPlaces) -> bool:
        return self._submit(_Job(job_id, src_spec, dst_spec, storing=True))

    def submit_load(self, job_id: int, src_spec: ArenaPlaces, dst_spec: GPULoadStoreSpec) -> bool:
        job = _Job(job_id, dst_spec, src_spec, storing=False)
        if not src_spec.is_within:
            return self._submit(job)
        # The step waits for it, so it does not wait for stores.
        self._do(job)
        return True

    def get_finished(self) -> list[TransferResult]:
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def wait(self, job_ids: set[int]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._open.isdisjoint(job_ids))

    def shutdown(self) -> None:
        """End the threads after the jobs that they have."""
        for thread in self._threads:
            thread.shutdown()

    def _submit(self, job: _Job) -> bool:
        with self._changed:
            self._open.add(job.job_id)
        self._threads[job.storing].submit(self._do, job)
        return True

    def _do(self, job: _Job) -> None:
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
        arena = self._arena.of(job.places.session)
        if arena is None or time.monotonic() > job.places.until - SPARE_S:
            return None
        if not job.storing and min(job.places.offsets, default=0) < 0:
            return None
        runs = self._slot.runs(job.blocks, job.places.offsets, storing=job.storing)
        _check(runs, arena)
        move(runs, arena, storing=job.storing)
        # Otherwise the place may have been another's while it was copied.
        return runs.total if arena.is_served and time.monotonic() < job.places.until else None


def _check(runs: Runs, arena: MappedArena) -> None:
    if len(runs.arena) and int((runs.arena + runs.nbytes).max()) > arena.view.nbytes:
        raise ValueError(f"a place lies outside the arena's {arena.view.nbytes} bytes")


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
        self, spec: Any, vllm_config: Any, kv_cache_config: Any, arena: ServedArena, adapters: LoadedAdapters
    ) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self.tally = Tally()
        self._connector_worker_meta = StepReport()
        self._rank = spec.config.parallel.rank
        self._arena = arena
        self._adapters = adapters
        self._spoils_base = False
        self._laid: Laid | None = None
        self._reported: list[Laid | None] = []
        self._weights = WorkerWeights()
        self._reported_weights = self._weights.now
        # The names that updates by files have, by their number.
        self._renamed: dict[int, KvIdentity] = {}
        # The last plan that was taken in.
        self._plan: StepPlan | None = None
        # Blocks of loads within this step that have not succeeded yet, by job.
        self._within: dict[int, Sequence[int]] = {}
        # Jobs under way: what they are about, and when they began; loads that have become useless.
        self._jobs: dict[int, tuple[ArenaPlaces, float]] = {}
        self._spoiled: set[int] = set()
        self.failed_loads: set[str] = set()
        # Of an object with slots of several workers.
        self.slot: Slot | None = None

    def take_part(self, laid: Laid | None) -> None:
        """Tell the scheduler what this worker's blocks are named by, None if it can take part no more."""
        self._laid = laid

    def weights_change(self) -> None:
        """vLLM begins to update its weights. Waits for the copies under way: what they load is of no use."""
        self._weights.change()
        self._spoiled |= self._load_jobs.keys()
        if self.worker is not None:
            self.worker.wait(set(self._jobs))

    def weights_changed(self, name: Callable[[], KvIdentity]) -> None:
        """The update has ended; `name`, called in a thread, gives the name that other engines know its weights by, or
        raises."""
        naming, number = Promise[bool](), self._weights.now.updates

        def run() -> None:
            try:
                self._renamed[number] = name()
                naming.set_result(True)
            except Exception as error:  # noqa: BLE001 - of whatever kind, there is no name
                log.warning("no other engine shares KV of the updated weights: %s", error)
                naming.set_result(False)

        self._weights.changed(naming)
        threading.Thread(target=run, name="kvf-weights", daemon=True).start()

    def handle_preemptions(self, metadata: StepPlan) -> None:
        self._begin(metadata)
        super().handle_preemptions(metadata)

    def start_kv_transfers(self, metadata: StepPlan) -> None:
        self._within = dict(metadata.within)
        self._begin(metadata)
        began, fits = time.monotonic(), self._weights.fit(self._rank, metadata)
        for job_id, job in metadata.load_jobs.items():
            places = job.src_spec
            if not fits or (places.adapter is not None and not self._adapters.holds(places.adapter)):
                places.session = b""  # that of no session
            places.is_within = job_id in self._within
            self._jobs[job_id] = places, began
        super().start_kv_transfers(metadata)
        if self._within:
            self.worker.wait(set(self._within))

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks of this step's loads that have not succeeded by now, whatever the reason is."""
        failed, self._within = self._within, {}
        self._connector_worker_meta.spoils_step |= bool(failed)
        return {block for blocks in failed.values() for block in blocks}

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        finished: set[str] = set()
        report, now = self._connector_worker_meta, time.monotonic()
        for result in self.worker.get_finished():
            request_id = self._load_jobs.pop(result.job_id, None)
            what = "store" if request_id is None else "load"
            places, began = self._jobs.pop(result.job_id, (ArenaPlaces(0), now))
            succeeded = result.success and result.job_id not in self._spoiled
            self._spoiled.discard(result.job_id)
            if succeeded and result.transfer_size is not None and result.transfer_time is not None:
                getattr(report.transfer_stats, what).record(result.transfer_size, result.transfer_time)
            self._count(what, places, result.transfer_size, now - began, succeeded=succeeded)
            if places.is_within or request_id is None:
                report.ended[places.number] += 1
                if not succeeded:
                    report.failed.add(places.number)
            if places.is_within:
                if succeeded:
                    self._within.pop(result.job_id, None)
                continue
            report.mark_completed(result.job_id)
            if request_id is not None:
                finished.add(request_id)
                if not succeeded:
                    self.failed_loads.add(request_id)
        return set(), finished

    def build_connector_worker_meta(self) -> StepReport | None:
        report = self._connector_worker_meta
        # Before the names: those are new by then.
        weights = self._weights.now
        if weights != self._reported_weights:
            self._reported_weights = report.weights[self._rank] = weights
        if self._laid is not None and weights.is_shared and weights.updates in self._renamed:
            self._laid = self._laid.renamed(self._renamed[weights.updates])
        if self._reported != [self._laid] and self.worker is not None:
            self._reported = [self._laid]
            report.served[self._rank] = self._laid
        if news := self._adapters.take_news():
            report.adapters[self._rank] = news
        if self._adapters.spoils_base() and not self._spoils_base:
            self._spoils_base = report.spoils_base = True
        if not report.says_anything:
            return None
        self._connector_worker_meta = StepReport()
        return report

    def _begin(self, plan: StepPlan) -> None:
        """Take in the plan of a step, at the first of its calls. Its stores begin here, since earlier steps have
        computed their blocks; those that were planned for other weights fail."""
        if plan is self._plan:
            return
        self._plan = plan
        self._arena.follow(plan.arena)
        if self.slot is not None and plan.slot_bytes:
            self.slot.offset = self._rank * plan.slot_bytes
        self._weights.begin_step(plan)
        fits, now = self._weights.fit(self._rank, plan), time.monotonic()
        for job_id, job in plan.store_jobs.items():
            if self._is_store_writer:
                self._jobs[job_id] = job.dst_spec, now
                self._unsubmitted_store_jobs.append((job_id, job.src_spec, job.dst_spec))
                if not fits:
                    self._spoiled.add(job_id)
            else:
                self._connector_worker_meta.mark_completed(job_id)
                self._connector_worker_meta.ended[job.dst_spec.number] += 1
        plan.store_jobs.clear()

    def _count(self, what: str, places: ArenaPlaces, nbytes: int | None, seconds: float, *, succeeded: bool) -> None:
        if not succeeded:
            self.tally.count(f"failed_{what}s")
            return
        done = "loaded" if what == "load" else "stored"
        self.tally.count(f"{done}_bytes", nbytes or 0)
        self.tally.count(f"{done}_tokens", places.tokens)
        self.tally.took(what, seconds)
