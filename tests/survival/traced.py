"""A process that counts the memory of its Python objects: on SIGUSR1 it writes the sum to a file. For programs that are
measured, and for those who measure."""

from __future__ import annotations

import gc
import os
import signal
import tracemalloc
from pathlib import Path

from tests.waiting import wait_until

# Names the folder for those files; each process's is named by its id.
FOLDER_VARIABLE = "KVFRAMEWORK_TEST_TRACED"


def start() -> None:
    """In the process to be measured, in its main thread."""
    tracemalloc.start()
    signal.signal(signal.SIGUSR1, _tell)


def traced_bytes() -> int:
    """Of this process, without what only waits to be collected."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def traced_bytes_of(pid: int) -> int:
    """Of a process that has called `start`."""
    path = Path(os.environ[FOLDER_VARIABLE]) / str(pid)
    path.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    wait_until(path.exists, 20, "the traced memory")
    return int(path.read_text())


def _tell(*_: object) -> None:
    path = Path(os.environ[FOLDER_VARIABLE]) / str(os.getpid())
    path.with_suffix(".new").write_text(str(traced_bytes()))
    path.with_suffix(".new").replace(path)
