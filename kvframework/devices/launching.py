"""Owns which copies of a device are launched when: jobs wait for their events, launches for room. No I/O of its own.

Runs in the copier process, driven by its loop. Loads and stores have a stream, a bound of bytes and a pace each, so
that neither waits for the other. A job whose event is not reached holds up nobody. A job ends once what was launched
of it is done, whatever else happened.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvframework.api.driver import CopierDriver, CopyBatch
from kvframework.errors import DeviceError, DeviceLost, KVFrameworkError


class Pace:
    """At most `bytes_per_s` (0: no bound): a launch waits until those before it have been paid for.

    Nothing is saved up while there is nothing to do, and whatever its size, one launch goes at a time: over any time t
    at most `bytes_per_s` x t bytes and one launch begin.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._paid = 0.0

    def left(self, now: float) -> float:
        """Seconds until the next launch may be, 0 if it may be now."""
        return max(self._paid - now, 0.0)

    def launched(self, nbytes: int, now: float) -> None:
        if self._bytes_per_s:
            self._paid = max(self._paid, now) + nbytes / self._bytes_per_s


log = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """One copy. `event` is the engine's, opened (None: nothing to wait for); `end` is the highest byte of the arena."""

    number: int
    context: int
    is_store: bool
    batches: Iterator[CopyBatch]
    event: Any
    end: int
    error: KVFrameworkError | None = None
    cancelled: bool = False
    waited: bool = False
    launched: int = 0
    upcoming: CopyBatch | None = None
    exhausted: bool = False

    def advance(self) -> None:
        """Looks one batch ahead, so that a job ends with its last one."""
        self.upcoming = next(self.batches, None)
        self.exhausted = self.upcoming is None

    @property
    def stopped(self) -> bool:
        return self.exhausted or self.cancelled or self.error is not None


@dataclass(eq=False)
class _Launch:
    job: Job
    event: Any
    nbytes: int
    started: float


@dataclass(eq=False)
class _Direction:
    """Loads or stores of the device."""

    stream: Any
    pace: Pace
    jobs: deque[Job] = field(default_factory=deque)
    launches: deque[_Launch] = field(default_factory=deque)
    in_flight: int = 0


class Launcher:
    """All jobs of one device. `done(job)` is called once for each; `clock` is monotonic seconds."""

    def __init__(
        self,
        driver: CopierDriver[Any, Any],
        *,
        limit: int,
        pace: int = 0,
        usable: Callable[[], int],
        done: Callable[[Job], None],
        clock: Callable[[], float],
    ) -> None:
        self._driver = driver
        self._limit = limit
        self._usable = usable
        self._done = done
        self._clock = clock
        self._spare: list[Any] = []
        self._loads = _Direction(driver.create_stream(loads=True), Pace(pace))
        self._stores = _Direction(driver.create_stream(loads=False), Pace(pace))

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to look at."""
        return any(each.jobs or each.launches for each in (self._loads, self._stores))

    def rest_s(self) -> float:
        """For how long `step` finds nothing to do, unless it is told something: all that is left waits for its pace."""
        now = self._clock()
        waiting = [each for each in (self._loads, self._stores) if each.jobs or each.launches]
        return min((0.0 if each.launches else each.pace.left(now) for each in waiting), default=0.0)

    def oldest_s(self) -> float:
        """How long the oldest launch has been under way."""
        now = self._clock()
        return max((now - each.launches[0].started for each in (self._loads, self._stores) if each.launches), default=0)

    def add(self, job: Job) -> None:
        (self._stores if job.is_store else self._loads).jobs.append(job)

    def cancel(self, number: int) -> None:
        """No further launch of this job; it ends with what was launched."""
        for job in self._jobs():
            if job.number == number:
                job.cancelled = True

    def cancel_context(self, context: int) -> None:
        for job in self._jobs():
            if job.context == context:
                job.cancelled = True

    def holds(self, context: int) -> bool:
        """Whether a job of this instance is not done."""
        return any(job.context == context for job in self._jobs())

    def step(self) -> bool:
        """Takes what has completed and launches what there is room for; whether anything has changed. Raises
        `DeviceLost`; other errors end their job."""
        changed = False
        for direction in (self._loads, self._stores):
            changed |= self._collect(direction)
            changed |= self._launch(direction)
            changed |= self._finish(direction)
        return changed

    def _jobs(self) -> Iterator[Job]:
        yield from self._loads.jobs
        yield from self._stores.jobs

    def _collect(self, direction: _Direction) -> bool:
        changed = False
        while direction.launches:
            launch = direction.launches[0]
            try:
                if not self._driver.reached(launch.event):
                    break
            except DeviceLost:
                raise
            except DeviceError as error:
                # The stream has come past it, or the driver could not say so.
                launch.job.error = launch.job.error or error
            direction.launches.popleft()
            direction.in_flight -= launch.nbytes
            launch.job.launched -= 1
            self._spare.append(launch.event)
            changed = True
        return changed

    def _launch(self, direction: _Direction) -> bool:
        changed = False
        for job in list(direction.jobs):
            if not job.stopped and self._is_ready(job):
                changed |= self._launch_job(direction, job)
                if not self._has_room(direction):
                    break
        return changed

    def _has_room(self, direction: _Direction) -> bool:
        return direction.in_flight < self._limit and not direction.pace.left(self._clock())

    def _is_ready(self, job: Job) -> bool:
        if job.launched:
            return True
        if job.end > self._usable():
            return False
        try:
            return job.event is None or self._driver.reached(job.event)
        except DeviceLost:
            raise
        except DeviceError as error:
            job.error = error
            return False

    def _launch_job(self, direction: _Direction, job: Job) -> bool:
        changed = False
        if job.upcoming is None:
            job.advance()
            changed = job.exhausted
        while not job.stopped and self._has_room(direction):
            batch = job.upcoming
            assert batch is not None
            job.advance()
            changed = True
            event = None
            try:
                event = self._spare.pop() if self._spare else self._driver.create_event()
                if job.event is not None and not job.waited:
                    self._driver.wait(direction.stream, job.event)
                    job.waited = True
                self._driver.copy(direction.stream, batch, to_arena=job.is_store)
            except DeviceLost:
                raise
            except DeviceError as error:
                job.error = error
            if event is None:
                break
            # Also behind a launch that failed, which may have begun: the job ends only once the stream is past it.
            self._driver.record(event, direction.stream)
            now = self._clock()
            direction.launches.append(_Launch(job, event, batch.nbytes, now))
            direction.in_flight += batch.nbytes
            direction.pace.launched(batch.nbytes, now)
            job.launched += 1
        return changed

    def _finish(self, direction: _Direction) -> bool:
        ended = [job for job in direction.jobs if job.stopped and not job.launched]
        for job in ended:
            direction.jobs.remove(job)
            self._done(job)
        return bool(ended)
