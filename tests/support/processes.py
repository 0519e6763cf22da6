"""A process seen from outside: descriptors, threads, memory, children. Linux only."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from tests.support.waiting import wait_until


def ran(
    *command: str, code: int | None = 0, timeout: float = 240.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, which has to be with this `code`; None: with any."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **options)
    assert code in (None, done.returncode), (done.returncode, done.stdout + done.stderr)
    return done


def descriptors(pid: int) -> dict[int, str]:
    """Return the target of each open descriptor."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found[int(entry.name)] = os.readlink(entry)
    return found


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def own_bytes(pid: int) -> int:
    """Return the anonymous resident memory: without the arena, which is a shared mapping."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10


def arenas(pid: int) -> int:
    """Return the number of mapped memfds."""
    return sum("/memfd:" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


def busy_s(pid: int) -> float:
    """Return the processor time used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def send(pid: int, number: int) -> None:
    """Send a signal. After SIGSTOP no thread of the process runs: the others go on until the first of them gets a
    processor."""
    os.kill(pid, number)
    if number == signal.SIGSTOP:
        wait_until(lambda: states(pid) == {"T"}, what="the stop")


def states(pid: int) -> set[str]:
    """Return the states of the threads, each as the letter of `ps`."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # ended meanwhile
            found.add((task / "stat").read_text().rpartition(")")[2].split()[0])
    return found


def children(pid: int) -> set[int]:
    """Return the living children of the process."""
    found = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    return {int(child) for each in found for child in each}


def has_ended(pid: int) -> bool:
    """Whether there is no such process, or one whose end only its parent has yet to see."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
