"""Owns the question whether anybody else uses the machine: before a bench, and while it runs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvframework.bench.machine import cores

# A quiet machine's own housekeeping stays well below.
BUSY_CORES = 0.1

_LOOK_S = 0.5
_IDLE_FIELDS = (3, 4)  # idle, iowait
_COUNTED_FIELDS = 8  # guest time is in user time already


class Load(msgspec.Struct, frozen=True):
    """How many cores were busy with other processes' work, before and during the bench. `busy`: too many for figures
    that are to be believed."""

    cores: int
    loadavg_1min: float
    others_before: float
    others_during: float
    busy: bool

    @classmethod
    def of(cls, loadavg_1min: float, others_before: float, others_during: float) -> Load:
        busy = max(others_before, others_during) > BUSY_CORES
        return cls(cores(), loadavg_1min, others_before, others_during, busy)


class CpuSeconds(NamedTuple):
    """Processor time spent up to a moment: by everybody, and by this process and its children that have ended."""

    at: float
    everybody: float
    own: float

    @classmethod
    def now(cls) -> CpuSeconds:
        own = os.times()
        busy = busy_seconds(Path("/proc/stat").read_text(), os.sysconf("SC_CLK_TCK"))
        return cls(time.monotonic(), busy, sum(own[:4]))

    def others_until(self, later: CpuSeconds) -> float:
        """Cores that others kept busy in between, on average."""
        spent = (later.everybody - self.everybody) - (later.own - self.own)
        return max(0.0, spent) / max(later.at - self.at, 1e-9)


class LoadMeter:
    """Looks for half a second when made; `finish`, when the bench's children have ended, tells the rest. For the main
    thread."""

    def __init__(self, look_s: float = _LOOK_S) -> None:
        # Whoever started this process may have it ignore the end of children. Then the time of those that have ended
        # counts nowhere, and the bench's own would look like the work of others.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        before = CpuSeconds.now()
        time.sleep(look_s)
        self._start = CpuSeconds.now()
        self.others_before = before.others_until(self._start)
        self._loadavg = os.getloadavg()[0]

    def finish(self) -> Load:
        return Load.of(self._loadavg, self.others_before, self._start.others_until(CpuSeconds.now()))


def busy_seconds(proc_stat: str, ticks_per_second: int) -> float:
    """Seconds of all cores together that were not idle, from the text of /proc/stat."""
    fields = [int(field) for field in proc_stat.splitlines()[0].split()[1:]][:_COUNTED_FIELDS]
    return sum(ticks for index, ticks in enumerate(fields) if index not in _IDLE_FIELDS) / ticks_per_second
