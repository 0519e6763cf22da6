"""Processor time of the KV connectors within an engine, as its processes note it and as the kernel does.

`timed_connector` writes, for each process of an engine with a connector, the time within the engine's calls into it and
which threads are its own; what those took is the kernel's to say.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# The folder of such files, in the environment of an engine.
FOLDER = "KVFRAMEWORK_BENCH_CONNECTOR_TIMES"
# A file, each eight bytes in this machine's order: nanoseconds of the processor within calls; of these in the
# scheduler's thread; nanoseconds on the clock of the same calls; the number of threads; their ids.
FILE_BYTES = 4096
MOST_THREADS = FILE_BYTES // 8 - 4


class ConnectorTime(NamedTuple):
    """Seconds so far. `scheduler_s` is the part of `processor_s` in the schedulers' threads, `scheduler_clock_s` the
    time on the clock of the same calls, with all that they waited for."""

    processor_s: float
    scheduler_s: float
    scheduler_clock_s: float

    @classmethod
    def sum_of(cls, times: Iterable[ConnectorTime]) -> ConnectorTime:
        return cls(*map(sum, zip((0.0, 0.0, 0.0), *times, strict=True)))


def connector_time(processes: Iterable[int], folder: Path) -> ConnectorTime | None:
    """Return the time of the connectors of these processes; None if none has noted any.

    The processor time is that within the calls, that of the connectors' threads, and that of all threads which have
    ended: the copy kernels' end with each copy, and an engine ends none of its own while it serves.
    """
    noted = [_of_process(pid, folder / str(pid)) for pid in processes if (folder / str(pid)).exists()]
    return ConnectorTime.sum_of(noted) if noted else None


def _of_process(pid: int, file: Path) -> ConnectorTime:
    noted = array("Q", file.read_bytes())
    processor = noted[0]
    # Before the threads: what runs in between is counted with neither.
    with suppress(OSError):
        whole = time.clock_gettime_ns(_clock(pid))
        threads = {int(task.name): _thread_ns(task) for task in Path(f"/proc/{pid}/task").iterdir()}
        own = sum(threads.get(thread, 0) for thread in noted[4 : 4 + noted[3]])
        processor += own + max(whole - sum(threads.values()), 0)
    return ConnectorTime(processor / 1e9, noted[1] / 1e9, noted[2] / 1e9)


def _clock(pid: int) -> int:
    """The kernel's clock of a process: see clock_getcpuclockid(3), which Python has for its own threads only."""
    return (~pid << 3) | 2


def _thread_ns(task: Path) -> int:
    try:
        return int((task / "schedstat").read_text().split()[0])
    except OSError:  # it has just ended
        return 0
