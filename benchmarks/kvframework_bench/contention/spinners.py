"""Spinners: child processes that are stopped (SIGSTOP), and continued (SIGCONT) during a measurement.

`python -m kvframework_bench.contention.spinners PARENT` prints one line, then uses as much of a core as it can get
until it is killed, with its parent at the latest.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from kvf_demo.processes import uninterrupted
from kvframework_bench.machine import cores
from kvframework_bench.pausable import SWITCH_S, PausableChild
from kvframework_bench.process import LineChannel

_PR_SET_PDEATHSIG = 1


def main(parent: int) -> None:
    """Spin; never returns."""
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) or os.getppid() != parent:
        sys.exit("the parent has ended")
    os.write(sys.stdout.fileno(), b"spinning\n")
    while True:
        pass


_clock_of = ctypes.CDLL(None).clock_getcpuclockid
_SEEN_S = 0.0001


class Spinner(PausableChild):
    """One spinner. `running_spinners` starts it, stopped."""

    def __init__(self, name: str, directory: Path) -> None:
        command = [sys.executable, "-m", "kvframework_bench.contention.spinners", str(os.getpid())]
        super().__init__(name, command, directory, piped=True)

    def spun_s(self) -> float:
        """Return the processor time so far, by the process's clock: `/proc` has that of a running process only up to
        its last tick."""
        self.check_alive()
        clock = ctypes.c_int()
        if _clock_of(self.pid, ctypes.byref(clock)):
            raise self.failure("has no clock")
        return time.clock_gettime(clock.value)

    def has_spun(self, seconds: float) -> bool:
        return self.spun_s() >= seconds


class Spinners:
    """All spinners, as a `Disturbance`. `cores` are the cores that each of them had between `begin` and `end`: one
    figure each time."""

    def __init__(self, spinners: Sequence[Spinner]) -> None:
        self.count = len(spinners)
        self.cores: list[float] = []
        self._spinners = spinners
        self._since: tuple[float, float] | None = None

    def begin(self) -> None:
        """Continue them, and return once each of them has run. Raises `BenchFailed` if one does not."""
        if self._since is not None:
            return
        goals = [spinner.spun_s() + _SEEN_S for spinner in self._spinners]
        for spinner in self._spinners:
            spinner.resume()
        for spinner, goal in zip(self._spinners, goals, strict=True):
            spinner.await_that(partial(spinner.has_spun, goal), "does not run", SWITCH_S)
        self._since = time.perf_counter(), self._spun_s()

    def end(self) -> None:
        """Stop them, and return once all are stopped. Raises `BenchFailed` if one has ended."""
        if self._since is None:
            return
        began, before = self._since
        self._since = None
        self.cores.append((self._spun_s() - before) / (time.perf_counter() - began) / self.count)
        self.halt()

    def halt(self) -> None:
        """Return once all are stopped."""
        for spinner in self._spinners:
            spinner.pause()
        for spinner in self._spinners:
            spinner.await_paused()

    def _spun_s(self) -> float:
        return sum(spinner.spun_s() for spinner in self._spinners)


@contextmanager
def running_spinners(directory: Path, count: int | None = None) -> Iterator[Spinners]:
    """Yield `count` spinners (default: one for each core but one, at least one), stopped. They are killed on the way
    out, and with this process. Call it in the main thread. Raises `BenchFailed`."""
    with ExitStack() as stack:
        made = []
        for index in range(max(cores() - 1, 1) if count is None else count):
            with uninterrupted():
                made.append(stack.enter_context(Spinner(f"spinner {index + 1}", directory)))
        for spinner in made:
            LineChannel(spinner).receive()
        spinners = Spinners(made)
        spinners.halt()
        yield spinners


if __name__ == "__main__":
    main(int(sys.argv[1]))
