"""The storage threads under virtual time: each controller of the storage, with its threads. A call to a tier sleeps
until the virtual time at which it ends, and all else takes no time. One thread runs at a time, so the same input gives
the same outcome."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvf_plan.simulation.events import VirtualTime
from kvframework.storage.l2.tiers import Controller, Work

log = logging.getLogger(__name__)
T = TypeVar("T")


class Changed(threading.Condition):
    """A controller's `changed` where there is one thread: no lock, and `noted` says that there may be work."""

    def __init__(self) -> None:
        self.noted = True

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        return

    def notify(self, n: int = 1) -> None:
        self.noted = True

    notify_all = notify

    def wait(self, timeout: float | None = None) -> bool:
        return False

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        return predicate()


class Ended(BaseException):
    """Raised in the work of a thread that ends before it."""


class VirtualThread:
    """A thread that runs only while the one that resumes it waits. Its work calls `sleep`, and `poll` has the next work
    or None; `name` is for errors."""

    def __init__(self, name: str, poll: Callable[[], Work | None]) -> None:
        self._name = name
        self._poll = poll
        self._work: Work | None = None
        self._until: float | None = None
        self._ends = False
        # Locks, since a condition takes twice as long: each side waits for its own, which the other one releases.
        self._turn, self._back = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._back.acquire()
        threading.Thread(target=self._run, name=f"virtual-{name}", daemon=True).start()

    def begin(self, work: Work) -> None:
        """Take work, which `resume` begins."""
        self._work = work

    def resume(self) -> float | None:
        """Let the work go on; return the time until which it sleeps, None once there is no more."""
        self._turn.release()
        self._back.acquire()
        return self._until

    def sleep(self, until: float) -> None:
        """Let the other side go on; called by the work."""
        if self._ends:
            raise Ended
        self._until = until
        self._back.release()
        self._turn.acquire()
        if self._ends:
            raise Ended

    def end(self) -> None:
        """End the thread, and its work where that sleeps."""
        if not self._ends:
            self._ends = True
            self.resume()

    def _run(self) -> None:
        ends = False
        while not ends:
            self._turn.acquire()
            while self._work is not None and not self._ends:
                try:
                    self._work()
                except Ended:
                    break
                except Exception:
                    log.exception("%s failed", self._name)
                # Here, since it takes longer to change threads than to do most work.
                self._work = self._poll()
            self._until = None
            # Read before the other side may end this thread: it would wait for an answer.
            ends = self._ends
            self._back.release()


class Sleep:
    """How the calls of tiers sleep: the `thread` that runs, None outside of them, where they take no time. `failed`:
    any call has."""

    def __init__(self, time: VirtualTime) -> None:
        self.thread: VirtualThread | None = None
        self.failed = False
        self._time = time

    def until(self, when: float) -> None:
        thread = self.thread
        if thread is not None and when > self._time.now:
            thread.sleep(when)


class VirtualThreads:
    """`sleep` is how the tiers sleep."""

    def __init__(self, time: VirtualTime, controllers: Sequence[tuple[Controller, int]], sleep: Sleep) -> None:
        self._time = time
        self._controllers = controllers
        self._changed = [Changed() for _ in controllers]
        for (controller, _), changed in zip(controllers, self._changed, strict=True):
            controller.changed = changed
        self._threads = [
            [VirtualThread(each.name, partial(self._next, number)) for _ in range(count)]
            for number, (each, count) in enumerate(controllers)
        ]
        self._idle = [[*threads] for threads in self._threads]
        # When each controller is asked again without another reason.
        self._asked_at = [math.inf] * len(controllers)
        self._sleep = sleep
        # So many times as late are idle controllers asked at their time: more than 1 while nothing can happen.
        self.rarely = 1.0

    @property
    def busy(self) -> bool:
        """Whether a job is under way."""
        return any(len(idle) < count for idle, (_, count) in zip(self._idle, self._controllers, strict=True))

    def look(self) -> None:
        """Give idle threads what there is to do, after anything has happened."""
        asked: set[int] = set()
        found = True
        while found:
            found = False
            for number, changed in enumerate(self._changed):
                if changed.noted:
                    found, changed.noted = True, False
                    asked.add(number)
                    self._give(number)
        for number in sorted(asked):
            if self._idle[number]:
                self._ask_again(number, self._time.now + self.rarely * self._controllers[number][0].wait_s())

    def awake(self) -> None:
        """Ask all controllers again, no later than they say."""
        self.rarely = 1.0
        for changed in self._changed:
            changed.notify()

    def close(self) -> None:
        """End all threads, and what they do."""
        for threads in self._threads:
            for thread in threads:
                thread.end()

    def _give(self, number: int) -> None:
        controller, idle = self._controllers[number][0], self._idle[number]
        while idle and (work := controller.poll()) is not None:
            thread = idle.pop()
            thread.begin(work)
            self._drive(number, thread)

    def _ask_again(self, number: int, when: float) -> None:
        if when <= self._time.now:
            # It is due but for a rounding: after the next event.
            self._changed[number].noted = True
        elif when < self._asked_at[number]:
            self._asked_at[number] = when
            self._time.at(when, lambda: self._asked(number, when))

    def _asked(self, number: int, when: float) -> None:
        if self._asked_at[number] == when:
            self._asked_at[number] = math.inf
            self._changed[number].notify()

    def _drive(self, number: int, thread: VirtualThread) -> None:
        """Let a thread go on until its work sleeps or has ended."""
        self._sleep.thread = thread
        until = thread.resume()
        self._sleep.thread = None
        if until is None:
            self._idle[number].append(thread)
        else:
            self._time.at(until, partial(self._drive, number, thread))

    def _next(self, number: int) -> Work | None:
        """Return what a thread does after its work; called by the thread."""
        self._changed[number].notify()
        if self._sleep.failed:
            # What it learned of a tier may be news to all.
            for each in self._changed:
                each.notify()
        return self._controllers[number][0].poll()
