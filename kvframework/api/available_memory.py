"""The memory that this process may still take. Pure reading of /proc and the cgroup files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_memory"]


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be made resident now: the machine's MemAvailable or the tightest cgroup's headroom.

    A limit that cannot be read does not count, so an unreadable file never stops a start.
    """
    rooms = [kib * 1024 for name, kib in _table(proc / "meminfo").items() if name == "MemAvailable:"]
    rooms += _cgroup_headrooms(proc / "self" / "cgroup", cgroups)
    return min(rooms, default=sys.maxsize)


def _cgroup_headrooms(membership: Path, cgroups: Path) -> Iterator[int]:
    for line in _text(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            for directory in _up(cgroups, group):
                yield from _headroom(directory, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            for directory in _up(cgroups / "memory", group):
                yield from _headroom(directory, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _up(root: Path, group: str) -> Iterator[Path]:
    """The group's directory and all above it: every one of them may hold the limit. Inside a container the path may
    name a directory of the host that does not exist; then the root of the container counts."""
    directory = root / group.strip("/")
    yield directory
    while directory != root and root in directory.parents:
        directory = directory.parent
        yield directory


def _headroom(directory: Path, limit_file: str, usage_file: str, reclaimable: str) -> Iterator[int]:
    limit, usage = _text(directory / limit_file).strip(), _text(directory / usage_file).strip()
    if limit.isdigit() and usage.isdigit():
        cache = _table(directory / "memory.stat").get(reclaimable, 0)
        yield max(int(limit) - int(usage) + cache, 0)


def _table(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
