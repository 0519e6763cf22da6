"""The threads of a simulation ask a controller when it says that there may be work, and when its time has come."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from kvf_plan.simulation.events import VirtualTime
from kvf_plan.simulation.threads import Sleep, VirtualThreads


class Work:
    """A controller with as much work as it is given; `due_s` is its wait."""

    name = "work"
    closing = False

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.todo = self.done = self.polls = 0
        self.due_s = math.inf

    def wait_s(self) -> float:
        return self.due_s

    def poll(self) -> Callable[[], None] | None:
        self.polls += 1
        if not self.todo:
            return None
        self.todo -= 1
        return self._finish

    def _finish(self) -> None:
        self.done += 1


def test_what_is_due_but_for_a_rounding_is_asked_after_the_next_event() -> None:
    work, time = Work(), VirtualTime(1e9)
    work.due_s = 1e-12
    threads = VirtualThreads(time, [(work, 1)], Sleep(time))
    threads.look()
    assert not len(time)
    work.todo, work.due_s = 1, math.inf
    threads.look()
    assert work.done == 1


def test_work_sleeps_while_others_go_on_and_ends_with_its_threads() -> None:
    time = VirtualTime()
    sleep, done = Sleep(time), []

    class Sleeper(Work):
        def _finish(self) -> None:
            number = self.todo
            try:
                sleep.until(time.now + 1.0 + number)
                done.append((number, time.now))
            finally:
                self.done += 1

    work = Sleeper()
    threads = VirtualThreads(time, [(work, 2)], sleep)
    work.todo = 3
    threads.look()
    assert (work.done, work.todo, threads.busy) == (0, 1, True)
    while len(time) > 1:
        time.happen()
        threads.look()
    assert done == [(1, 2.0), (2, 3.0)], "the third began at 2 s, until 3 s"
    threads.close()
    assert (work.done, len(done)) == (3, 2)
