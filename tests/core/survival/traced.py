"""A process that counts the memory of its Python objects: on SIGUSR2 it writes the sum to a file. For programs that are
measured, and for those who measure."""

from __future__ import annotations

import gc
import json
import os
import signal
import tracemalloc
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.waiting import wait_until

# Names the folder for those files; each process's is named by its id.
FOLDER_VARIABLE = "KVFRAMEWORK_TEST_TRACED"


def start() -> None:
    """In the process to be measured, in its main thread."""
    tracemalloc.start()
    signal.signal(signal.SIGUSR2, _tell)


@dataclass(frozen=True)
class Traced:
    """What the Python objects of a process take, and how many of them the garbage collector follows: what has parts."""

    nbytes: int
    objects: int


def traced() -> Traced:
    """Of this process, without what only waits to be collected."""
    gc.collect()
    return Traced(tracemalloc.get_traced_memory()[0], len(gc.get_objects()))


def traced_of(pid: int) -> Traced:
    """Of a process that has called `start`."""
    path = Path(os.environ[FOLDER_VARIABLE]) / str(pid)
    path.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR2)
    wait_until(path.exists, what="the traced memory")
    return Traced(**json.loads(path.read_text()))


def _tell(*_: object) -> None:
    path = Path(os.environ[FOLDER_VARIABLE]) / str(os.getpid())
    path.with_suffix(".new").write_text(json.dumps(asdict(traced())))
    path.with_suffix(".new").replace(path)
