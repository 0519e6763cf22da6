"""A process seen from outside: descriptors, threads, memory, children. Linux only."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


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


def children(pid: int) -> set[int]:
    """Return the living children of the process."""
    found = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    return {int(child) for each in found for child in each}


def is_stopped(pid: int) -> bool:
    """Whether a stop signal has taken effect: that of `os.kill` does not at once."""
    stats = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {stat.rpartition(")")[2].split()[0] for stat in stats} == {"T"}


def has_ended(pid: int) -> bool:
    """Whether there is no such process, or one whose end only its parent has yet to see."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
