"""Owns what a process costs while nobody asks anything of it: its memory besides shared memory, its processor time."""

from __future__ import annotations

import re
import time
from pathlib import Path

import msgspec


class Resident(msgspec.Struct, frozen=True):
    """Resident memory in bytes. The arena is shared memory, so `shmem` is left out of what a server costs."""

    anon: int
    file: int
    shmem: int

    @property
    def besides_shared(self) -> int:
        return self.anon + self.file


def resident(pid: int) -> Resident:
    return parse_status(Path(f"/proc/{pid}/status").read_text())


def parse_status(text: str) -> Resident:
    """From the text of /proc/PID/status. Raises `ValueError` if it names no such sizes."""
    sizes = {name: int(kib) * 1024 for name, kib in re.findall(r"^(Rss\w+):\s*(\d+) kB$", text, re.MULTILINE)}
    try:
        return Resident(sizes["RssAnon"], sizes["RssFile"], sizes["RssShmem"])
    except KeyError as error:
        raise ValueError(f"no {error.args[0]} in the status of a process") from None


def has_mapped(pid: int, library: str) -> bool:
    """Whether a file whose name contains `library` is mapped by the process."""
    return library in Path(f"/proc/{pid}/maps").read_text()


def idle_cores(pid: int, seconds: float) -> float:
    """The share of a core that the process uses during the next `seconds`. Blocks so long."""
    before, started = run_ns(pid), time.perf_counter_ns()
    time.sleep(seconds)
    return (run_ns(pid) - before) / (time.perf_counter_ns() - started)


def run_ns(pid: int) -> int:
    """Nanoseconds that the process's threads have run; ticks of 10 ms are too coarse for an idle process."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))
