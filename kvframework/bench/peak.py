"""Owns how far a process's memory besides shared memory grew at most, by the kernel's own high-water mark."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from kvframework.bench.at_rest import resident


class PeakMeter:
    """Starts when made. Where the kernel cannot reset a process's peak, what it reached before counts as well."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._before = resident(pid)

    def growth(self) -> int:
        """Bytes above those at the start, at the highest. Shared memory that was mapped since then counts, too."""
        before = self._before.besides_shared + self._before.shmem
        return max(parse_peak(Path(f"/proc/{self._pid}/status").read_text()) - before, 0)


def parse_peak(text: str) -> int:
    """The highest resident memory in bytes, from the text of /proc/PID/status. Raises `ValueError` without it."""
    found = re.search(r"^VmHWM:\s*(\d+) kB$", text, re.MULTILINE)
    if found is None:
        raise ValueError("no VmHWM in the status of a process")
    return int(found[1]) * 1024
