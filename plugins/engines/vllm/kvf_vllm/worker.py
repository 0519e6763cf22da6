"""The worker side: starts the loads and stores that the scheduler has planned, and reports their ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvf_vllm.adapters import LoadedAdapters
from kvf_vllm.pace import PiecePace
from kvf_vllm.step_messages import AdapterUse, Served, StepPlan, StepReport, TransferOp
from kvf_vllm.tally import Tally
from kvf_vllm.weights import WorkerWeights
from kvframework.api.futures import Future
from kvframework.api.transport import LoadOutcome, StoreOutcome, error_code
from kvframework.errors import KVFrameworkError

if TYPE_CHECKING:
    from kvf_vllm.attach import AttachedInstance

log = logging.getLogger(__name__)
# A transfer's own deadline ends it long before; this covers a transport that misses its own deadline.
LAST_RESORT_S = 120.0
# A load that is as old has no bound any more: its pins (`[server] retrieve_lease_s`, 30 s) do not last for ever.
PATIENCE_S = 10.0
O = TypeVar("O", LoadOutcome, StoreOutcome)  # noqa: E741
_DONE = {"load": "loaded", "store": "stored"}


class WorkerSide:
    """`stores` False: this worker holds the same KV as another one, which stores it. `block_size` is that of an engine
    with one KV cache group of full attention, which reports failed loads by their blocks; 0: by their requests. For one
    thread."""

    def __init__(
        self,
        instance: AttachedInstance,
        *,
        worker: int = 0,
        stores: bool = True,
        block_size: int = 0,
        adapters: LoadedAdapters | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.tally = Tally()
        self._instance = instance
        self._adapters = adapters or LoadedAdapters()
        self._worker = worker
        self._stores = stores
        self._block_size = block_size
        self._clock = clock
        self._pace = PiecePace(clock)
        self._loading: dict[str, tuple[TransferOp, Future[LoadOutcome], float]] = {}
        self._storing: dict[int, tuple[TransferOp, Future[StoreOutcome], float]] = {}
        self._report = StepReport()
        self._reported: list[tuple[Served | None, tuple[int, ...]]] = []
        self._weights = WorkerWeights()
        self._reported_weights = self._weights.now
        self._left: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._is_spoiled = False

    def before_step(self, plan: StepPlan) -> None:
        """End the stores whose blocks will be written in this step. Waits for them."""
        self._is_spoiled = False
        self._weights.begin_step(plan)
        for number in plan.fence:
            entry = self._storing.get(number)
            if entry is None:
                continue
            if not entry[1].query():
                self.tally.count("cancelled_stores")
            self._end(entry[1])
        self._settle_stores()

    def weights_change(self) -> None:
        """vLLM begins to update its weights. Waits for the transfers under way: what they load is of no use."""
        self._weights.change()
        for request_id, (op, loading, started) in self._loading.items():
            self._end(loading)
            self._loading[request_id] = (
                op,
                Future.resolved(LoadOutcome(False, "the engine's weights are being updated")),
                started,
            )
        for _, storing, _ in self._storing.values():
            self._end(storing)
        self._settle_stores()

    def weights_changed(self, naming: Future[bool]) -> None:
        """The update has ended; `naming` will say whether the weights have a name that other engines know."""
        self._weights.changed(naming)

    def load(self, plan: StepPlan) -> None:
        """Start the loads; those within the step are over when this returns. Of the others a piece is copied. Loads
        that were planned for other weights fail."""
        self._pace.begin()
        started, fits = self._clock(), self._weights.fit(self._worker, plan)
        # A load without digests stands for one that the scheduler could not plan, see
        # `SchedulerSide.allocated_in_vain`.
        named = [op for op in plan.loads if fits and op.digests and self._has(op.adapter)]
        futures: dict[str, Future[LoadOutcome]] = {}
        for within in (True, False):
            ops = [op for op in named if op.is_within is within]
            submitted = self._submitted(ops, partial(self._instance.load, in_pieces=not within), LoadOutcome.failed)
            futures.update(zip((op.request_id for op in ops), submitted, strict=True))
        for op in plan.loads:
            unnamed = Future.resolved(LoadOutcome(False, "the scheduler could not name the KV"))
            self._loading[op.request_id] = (op, futures.get(op.request_id, unnamed), started)
        self._end_within(started)
        self._advance(computes=plan.computes)
        self._settle_loads()

    def store(self, plan: StepPlan) -> None:
        """Start the stores of the tokens that the step has computed. If a load for this step has failed, the computed
        KV may be wrong, and if the weights are not those of the plan it has another name: nothing is stored then."""
        is_base_spoiled, started = self._adapters.spoils_base(), self._clock()
        is_spoiled = self._is_spoiled or not self._weights.fit(self._worker, plan)
        ops = []
        for op in plan.stores:
            if is_spoiled or self._instance.served is None:
                self._report.unstored[op.request_id] = min(op.start, self._report.unstored.get(op.request_id, op.start))
                self._report.ended[op.number] += 1
            elif self._stores and self._has(op.adapter) and (op.adapter is not None or not is_base_spoiled):
                ops.append(op)
            else:
                self._storing[op.number] = (op, Future.resolved(StoreOutcome(dropped=int(self._stores))), started)
        for op, future in zip(ops, self._submitted(ops, self._instance.store, _not_stored), strict=True):
            self._storing[op.number] = (op, future, started)
        self._settle_stores()

    def finished_loads(self, left: Iterable[str] = ()) -> tuple[set[str], set[str]]:
        """Requests whose loads between steps have ended since the last call, and the failed ones among them that can
        only be reported by request. Loads of requests that have `left` are cancelled: vLLM frees their blocks at the
        loads' ends. Never blocks."""
        for request_id in self._loading.keys() & left:
            self._left.add(request_id)
            self._loading[request_id][1].cancel()
        self._settle_loads()
        received, self._received = self._received, set()
        failed, self._failed = self._failed, set()
        return received, failed

    def take_failed_blocks(self) -> set[int]:
        """Blocks whose load failed since the last call, if it names them by blocks."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> StepReport:
        self._settle_stores()
        # Before the names: those are new by then.
        weights = self._weights.now
        if self._reported_weights != weights:
            self._reported_weights = self._report.weights[self._worker] = weights
        served = self._instance.served
        # Two registrations by one name are equal.
        state = [(served, served.instances if served is not None else ())]
        if self._reported != state:
            self._reported = state
            self._report.served[self._worker] = served
        news = self._adapters.take_news()
        if news:
            self._report.adapters[self._worker] = news
        report, self._report = self._report, StepReport()
        return report

    def close(self) -> None:
        """Wait until no transfer touches the engine's memory."""
        for _, loading, _ in self._loading.values():
            self._end(loading)
        for _, storing, _ in self._storing.values():
            self._end(storing)

    def _end_within(self, started: float) -> None:
        within = [(op, future) for op, future, _ in self._loading.values() if op.is_within]
        for _, future in within:
            self._wait(future)
        if tokens := sum(op.tokens for op, future in within if _succeeded(future)):
            self._report.copied(tokens, self._clock() - started)

    def _advance(self, *, computes: bool) -> None:
        """Copy the next piece of the loads, the oldest first."""
        left = self._pace.room(computes=computes)
        for op, future, since in self._loading.values():
            started = self._clock()
            try:
                nbytes = future.advance(left if started - since < PATIENCE_S else None)
            except Exception as error:
                # Its request would wait for ever, and with it those behind it.
                self.tally.count("errors")
                log.exception("a load failed: %s", type(error))
                future.cancel()
                continue
            if nbytes:
                took_s = self._clock() - started
                self._pace.copied(nbytes, took_s)
                self._report.copied(op.tokens * nbytes / max(self._instance.nbytes(op), 1), took_s)
                left = None if left is None else left - nbytes
                if left is not None and (left <= 0 or not future.query()):
                    break
        self._pace.end(computes=computes)

    def _submitted(
        self,
        ops: Sequence[TransferOp],
        submit: Callable[[Sequence[TransferOp]], list[Future[O]]],
        failed: Callable[[BaseException], O],
    ) -> list[Future[O]]:
        try:
            return submit(ops) if ops else []
        # After any failure the engine goes on without the cache.
        except Exception as error:
            if len(ops) > 1:  # none was sent: the bad one fails alone
                return [future for op in ops for future in self._submitted([op], submit, failed)]
            self.tally.count("errors")
            log.exception(
                "a transfer was not started: %s", error if isinstance(error, KVFrameworkError) else type(error)
            )
            return [Future.resolved(failed(error))]

    def _has(self, adapter: AdapterUse | None) -> bool:
        """True if the engine computes with the adapter that the scheduler's name stands for."""
        return adapter is None or self._adapters.holds(adapter)

    def _settle_loads(self) -> None:
        for request_id, (op, future, started) in list(self._loading.items()):
            if not future.query():
                continue
            del self._loading[request_id]
            self._report.loaded[request_id] += 1
            if not op.is_within:
                self._received.add(request_id)
            if request_id in self._left:
                self._left.discard(request_id)
                continue
            if _succeeded(future):
                self._count("load", op, started)
                continue
            self.tally.count("failed_loads")
            self._report.failed.add(request_id)
            self._is_spoiled = self._is_spoiled or op.is_within
            if self._block_size:
                self._failed_blocks.update(op.block_ids[0][op.skip // self._block_size :])
            else:
                self._failed.add(request_id)

    def _settle_stores(self) -> None:
        for number, (op, future, started) in list(self._storing.items()):
            if not future.query():
                continue
            del self._storing[number]
            self._report.ended[number] += 1
            succeeded = _succeeded(future)
            self._report.stored[number] += succeeded
            if not self._stores:
                continue
            if succeeded:
                self._count("store", op, started)
            else:
                self.tally.count("failed_stores")

    def _count(self, what: str, op: TransferOp, started: float) -> None:
        self.tally.count(f"{_DONE[what]}_bytes", self._instance.nbytes(op))
        self.tally.count(f"{_DONE[what]}_tokens", op.tokens)
        self.tally.took(what, self._clock() - started)

    def _wait(self, future: Future[O]) -> None:
        try:
            future.result(LAST_RESORT_S)
        except Exception:  # noqa: BLE001 - what became of it is asked later
            self._end(future)

    def _end(self, future: Future[O]) -> None:
        """Cancel the transfer; return once it no longer touches the blocks."""
        if future.query():
            return
        try:
            future.cancel()
            future.result(LAST_RESORT_S)
        except Exception as error:  # noqa: BLE001 - the others still end
            if not future.query():
                log.error("a transfer did not end within %s s: %s", LAST_RESORT_S, error)


def _not_stored(error: BaseException) -> StoreOutcome:
    return StoreOutcome(dropped=1, error=error_code(error))


def _succeeded(future: Future[O]) -> bool:
    try:
        return future.exception() is None and future.result(0).ok
    except Exception:  # noqa: BLE001 - in doubt it has failed
        return False
