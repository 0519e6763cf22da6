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

# The folder of such files, in the environment of an engine.
FOLDER = "KVFRAMEWORK_BENCH_CONNECTOR_TIMES"
# A file: nanoseconds within calls, the number of threads, their ids; each eight bytes in this machine's order.
FILE_BYTES = 4096
MOST_THREADS = FILE_BYTES // 8 - 2


def connector_s(processes: Iterable[int], folder: Path) -> float | None:
    """Return the processor time of the connectors of these processes so far, in seconds; None if none has said any.

    It is that within the calls, that of the connectors' threads, and that of all threads which have ended: the copy
    kernels' end with each copy, and an engine ends none of its own while it serves.
    """
    noted = [(pid, folder / str(pid)) for pid in processes if (folder / str(pid)).exists()]
    return sum(_of_process(pid, file) for pid, file in noted) / 1e9 if noted else None


def _of_process(pid: int, file: Path) -> int:
    noted = array("Q", file.read_bytes())
    # Before the threads: what runs in between is counted with neither.
    with suppress(OSError):
        whole = time.clock_gettime_ns(_clock(pid))
        threads = {int(task.name): _thread_ns(task) for task in Path(f"/proc/{pid}/task").iterdir()}
        own = sum(threads.get(thread, 0) for thread in noted[2 : 2 + noted[1]])
        return noted[0] + own + max(whole - sum(threads.values()), 0)
    return noted[0]


def _clock(pid: int) -> int:
    """The kernel's clock of a process: see clock_getcpuclockid(3), which Python has for its own threads only."""
    return (~pid << 3) | 2


def _thread_ns(task: Path) -> int:
    try:
        return int((task / "schedstat").read_text().split()[0])
    except OSError:  # it has just ended
        return 0
