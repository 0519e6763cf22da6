"""A transfer as steps between answers of the server: in the engine's thread as long as these arrive at once, else in a
thread of its own; and the steps of the path over shared memory. Engine side.

A transfer is a generator that yields each future it waits for, and continues with its result. It touches the engine's
memory between two yields only: while it waits, it can be cancelled at once, by `Cancelled` at its yield. A load in
pieces yields a `YieldPoint` before each: then the thread that calls `Future.advance` takes its steps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvframework.api.futures import Future, Promise
from kvframework.api.transport import (
    ArenaRange,
    EngineDrivenLink,
    LoadOutcome,
    LoadPlan,
    StoreOutcome,
    StorePlan,
    Transfer,
)
from kvframework.errors import Cancelled

if TYPE_CHECKING:
    import torch

    from kvf_cpu_gather.engine_memory import Moves

log = logging.getLogger(__name__)

R = TypeVar("R")
Steps = Generator[Future[Any], Any, R]
# Converts a transfer's return value or error to the result of its future.
Ended = Callable[["R | None", BaseException | None], R]
P = TypeVar("P", StorePlan, LoadPlan)


def planned(sent: Future[P]) -> Steps[P]:
    """Return the requested plan. If the transfer is cancelled meanwhile, everything that the answer reserves is given
    back: by the link, or here if the answer came before the cancel."""
    try:
        plan: P = yield sent
    except (Cancelled, GeneratorExit):
        sent.cancel()
        sent.add_done_callback(_abort)
        raise
    return plan


def _abort(sent: Future[StorePlan] | Future[LoadPlan]) -> None:
    if sent.exception() is None:
        sent.result(0).abort()


def unless_cancelled() -> Steps[None]:
    """Between a copy and its publication: a transfer that was cancelled meanwhile ends here, since other work may have
    written its blocks."""
    yield Future.resolved(None)


class YieldPoint(Promise["int | None"]):
    """The wait for `Future.advance`; its result are the bytes that it allows. The transfer notes what it has
    `moved`."""

    moved = 0


class TransferTask(Generic[R]):
    """One transfer under way. `borrowed` stays referenced until `future` is resolved. `elsewhere(task, awaited)` has
    another thread go on with it."""

    def __init__(
        self,
        steps: Steps[R],
        ended: Ended[R],
        borrowed: object,
        elsewhere: Callable[[TransferTask[R], Future[Any]], None],
    ) -> None:
        self.future: Promise[R] = Promise(self.cancel, advance_hook=self.advance)
        self._elsewhere = elsewhere
        self._steps = steps
        self._ended = ended
        self._borrowed = borrowed
        self._lock = threading.Lock()
        self._takes_steps = False
        self._is_cancelled = False
        self._awaited: Future[Any] | None = None
        self._pid = os.getpid()

    def cancel(self) -> None:
        """End the transfer before its next step. Waits for nothing."""
        with self._lock:
            self._is_cancelled = True
            if self._takes_steps or self.future.query():
                return
            self._takes_steps = True
        self._end(None, Cancelled("the transfer was cancelled"))

    def advance(self, nbytes: int | None) -> int:
        """See `Future.advance`. Nothing in a forked child, which has no arena."""
        if os.getpid() != self._pid:
            return 0
        with self._lock:
            point = self._awaited
            # Who takes steps now may not have begun to wait.
            if self._takes_steps or not isinstance(point, YieldPoint):
                return 0
        if not point.set_result(nbytes):
            return 0  # another thread has this one
        awaited = self.go_on()
        if awaited is not None:
            self._elsewhere(self, awaited)
        return point.moved

    def go_on(self) -> Future[Any] | None:
        """Take steps as long as the answers are there. Returns the future to wait for; None once the transfer's own is
        resolved."""
        while True:
            with self._lock:
                if self._takes_steps or self.future.query():
                    return None  # another thread cancels it
                self._takes_steps = True
            try:
                awaited = self._awaited = self._step()
                here = awaited.query()
            except StopIteration as end:
                self._end(end.value, None)
                return None
            except Exception as error:  # noqa: BLE001 - whatever fails, the engine goes on without the cache
                self._end(None, error)
                _forget_frames(error)
                return None
            except BaseException as error:
                self._end(None, error)
                raise
            with self._lock:
                is_cancelled = self._takes_steps = self._is_cancelled
            if is_cancelled:
                self._end(None, Cancelled("the transfer was cancelled"))
                return None
            if not here:
                return awaited

    def _step(self) -> Future[Any]:
        awaited = self._awaited
        if awaited is None:
            return next(self._steps)
        error = awaited.exception()
        return self._steps.throw(error) if error is not None else self._steps.send(awaited.result(0))

    def _end(self, result: R | None, error: BaseException | None) -> None:
        if isinstance(error, Cancelled):
            # A store that was sent in part knows what of it was answered.
            try:
                self._steps.throw(error)
            except StopIteration as end:
                result, error = end.value, None
            except Exception as raised:  # noqa: BLE001 - most often the error itself
                _forget_frames(raised)
        with contextlib.suppress(Exception):
            self._steps.close()  # gives back all that it has reserved
        outcome = self._ended(result, error)
        self._borrowed = self._awaited = None
        self.future.set_result(outcome)


def _forget_frames(error: BaseException | None) -> None:
    """Clear the frames of the error's traceback, which refer to the future that failed with the error, and so to
    themselves: until the cycle was collected it would keep the engine's tensors, and the arena mapped."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class TaskRunner:
    """The transfers of one instance, and the thread that takes their steps once an answer did not arrive at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: set[TransferTask[Any]] = set()
        self._ready: queue.SimpleQueue[TransferTask[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, steps: Steps[R], ended: Ended[R], borrowed: object, *, here: bool) -> Future[R]:
        """Start a transfer. `here`: the calling thread takes the first steps; else it never waits and never copies.
        `ended` makes the future's result. Raises `RuntimeError` if no further thread can be started."""
        task = TransferTask(steps, ended, borrowed, self._continue)
        awaited = task.go_on() if here else None
        if task.future.query():
            return task.future
        with self._lock:
            self._under_way.add(task)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvf-gather", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    self._under_way.discard(task)
                    task.cancel()
                    raise
                self._thread = thread
        task.future.add_done_callback(lambda _: self._forget(task))
        self._continue(task, awaited)
        return task.future

    def close(self) -> None:
        """Cancel transfers under way, and wait for a copy that has begun. May be used again."""
        with self._lock:
            thread, self._thread = self._thread, None
            tasks = list(self._under_way)
        for task in tasks:
            task.cancel()
        if thread is not None:
            self._ready.put(None)
            thread.join()

    def _run(self) -> None:
        while (task := self._ready.get()) is not None:
            try:
                awaited = task.go_on()
            except BaseException:
                log.exception("a transfer failed and ended its thread")
            else:
                if awaited is not None:
                    self._continue(task, awaited)
                del awaited
            del task  # and with it all that it borrows

    def _continue(self, task: TransferTask[Any], awaited: Future[Any] | None) -> None:
        if awaited is None:
            self._ready.put(task)
        elif not isinstance(awaited, YieldPoint):
            awaited.add_done_callback(lambda _: self._ready.put(task))

    def _forget(self, task: TransferTask[Any]) -> None:
        with self._lock:
            self._under_way.discard(task)


def store_in_arena(
    link: EngineDrivenLink, transfer: Transfer, moves: Moves, event: torch.Event | None
) -> Steps[StoreOutcome]:
    """Store through the arena. Raises `KVFrameworkError`; nothing is published then."""
    with (yield from planned(link.prepare_store(transfer))) as plan:
        if plan.ranges:
            if event is not None:
                event.synchronize()
            moves.gather(plan.arena, plan.ranges)
            yield from unless_cancelled()
        try:
            committed: StoreOutcome = yield plan.commit()
        except Cancelled as error:
            return plan.outcome + StoreOutcome(unknown=len(plan.ranges), error=error.code)
        return committed


def load_from_arena(
    link: EngineDrivenLink, transfer: Transfer, moves: Moves, event: torch.Event | None, skip_tokens: int
) -> Steps[LoadOutcome]:
    """Load through the arena. Raises `KVFrameworkError`; the blocks have any content then."""
    with (yield from planned(link.prepare_load(transfer))) as plan:
        if plan.hit:
            if event is not None:
                event.synchronize()
            left = plan.ranges
            while left:
                point = YieldPoint()
                room = (yield point) if transfer.in_pieces else None
                piece = left[: _that_fit(left, room)]
                moves.scatter(plan.arena, piece, skip_tokens)
                moves.memory.wait()
                left, point.moved = left[len(piece) :], sum(place.length for place in piece)
        committed: LoadOutcome = yield plan.commit()
        return committed


def _that_fit(places: Sequence[ArenaRange], room: int | None) -> int:
    """Return how many of the first places fit into so many bytes, at least one; None: all."""
    if room is None:
        return len(places)
    ends = accumulate(place.length for place in places)
    return max(sum(1 for _ in takewhile(lambda end: end <= room, ends)), 1)
