"""The machine of a run: its description, the versions of packages, and the load by other processes."""

from __future__ import annotations

import os
import platform
import signal
import time
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import msgspec

_PACKAGES = ("kvframework", "pyzmq", "msgspec", "numpy", "torch")


class Machine(msgspec.Struct, frozen=True):
    """`cores` are those that this process may use."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    python: str
    packages: dict[str, str]


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def available_bytes() -> int:
    """Return the memory that new processes can have without pushing others out, by the kernel's estimate."""
    return int(_field(Path("/proc/meminfo").read_text(), "MemAvailable").split()[0]) * 1024


def describe_machine() -> Machine:
    """Return the machine; reads /proc and imports none of the packages that it names."""
    return Machine(
        cpu=_field(Path("/proc/cpuinfo").read_text(), "model name") or platform.machine(),
        cores=cores(),
        memory_bytes=int(_field(Path("/proc/meminfo").read_text(), "MemTotal").split()[0]) * 1024,
        kernel=platform.release(),
        python=platform.python_version(),
        packages={name: version for name in _PACKAGES if (version := _version(name))},
    )


def _field(text: str, name: str) -> str:
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


# The load of a quiet machine's own housekeeping stays well below.
BUSY_CORES = 0.1

_LOOK_S = 0.5
_IDLE_FIELDS = (3, 4)  # idle, iowait
_COUNTED_FIELDS = 8  # guest time is in user time already


class Load(msgspec.Struct, frozen=True):
    """How many cores were busy with other processes' work, before and during the bench. `busy`: too many for figures
    to be believed."""

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
    """Processor time spent up to a moment: by all processes, and by this process and its children that have ended."""

    at: float
    everybody: float
    own: float

    @classmethod
    def now(cls) -> CpuSeconds:
        own = os.times()
        busy = busy_seconds(Path("/proc/stat").read_text(), os.sysconf("SC_CLK_TCK"))
        return cls(time.monotonic(), busy, sum(own[:4]))

    def others_until(self, later: CpuSeconds) -> float:
        """Return the cores that other processes kept busy in between, on average."""
        spent = (later.everybody - self.everybody) - (later.own - self.own)
        return max(0.0, spent) / max(later.at - self.at, 1e-9)


class LoadMeter:
    """Looks for half a second when made; `finish`, when the bench's children have ended, gives the rest. For the main
    thread."""

    def __init__(self, look_s: float = _LOOK_S) -> None:
        # This process may have been started so that it ignores the end of children. Then the time of those that have
        # ended counts nowhere, and the benchmark's own would look like the work of others.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        before = CpuSeconds.now()
        time.sleep(look_s)
        self._start = CpuSeconds.now()
        self.others_before = before.others_until(self._start)
        self._loadavg = os.getloadavg()[0]

    def finish(self) -> Load:
        return Load.of(self._loadavg, self.others_before, self._start.others_until(CpuSeconds.now()))


def busy_seconds(proc_stat: str, ticks_per_second: int) -> float:
    """Return the seconds of all cores together that were not idle, from the text of /proc/stat."""
    fields = [int(field) for field in proc_stat.splitlines()[0].split()[1:]][:_COUNTED_FIELDS]
    return sum(ticks for index, ticks in enumerate(fields) if index not in _IDLE_FIELDS) / ticks_per_second
