"""The checks of the machine's memory and of the cgroup's limit, and that a memfd, as L1 uses it, can be created."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from kvframework.api.findings import Finding
from kvframework.api.options import ByteSize
from kvframework.config import keeper_path
from kvframework.errors import EndpointError
from kvframework.keeper.sockets import CONTROL_SUFFIX, ask

_ALMOST = 0.9
_ASK_S = 1.0


def memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Iterator[Finding]:
    rows = [line.split() for line in _text(proc / "meminfo").splitlines()]
    sizes = {row[0]: ByteSize(int(row[1]) * 1024) for row in rows if len(row) > 1 and row[1].isdigit()}
    if "MemAvailable:" in sizes and "MemTotal:" in sizes:
        fact = f"{sizes['MemAvailable:']} available of {sizes['MemTotal:']}"
        yield Finding("memory.machine", "ok", fact)
    yield _cgroup(proc / "self" / "cgroup", cgroups)
    yield _memfd()


def kept(endpoint: str) -> Iterator[Finding]:
    """The memory that `kvframework hold` keeps for the server at `endpoint`; nothing where none runs. Blocks for a
    second at most."""
    try:
        keeper = ask(keeper_path(endpoint) + CONTROL_SUFFIX, {"do": "status"}, _ASK_S)
    except (EndpointError, OSError):
        return
    nbytes = ByteSize(sum(row["bytes"] for row in keeper["held"]))
    fact = (
        f"`kvframework hold`, process {keeper['pid']}, keeps {nbytes}, "
        "charged to the cgroup of the server that touched it first"
    )
    if keeper["server"] is None and nbytes:
        yield Finding(
            "memory.kept", "warn", f"{fact}, and no server runs", "its log says why; `kvframework hold --drop` frees it"
        )
    else:
        yield Finding("memory.kept", "ok", fact)


def _cgroup(membership: Path, cgroups: Path) -> Finding:
    found = [each for line in _text(membership).splitlines() for each in _limits(line, cgroups)]
    if not found:
        return Finding("memory.cgroup", "ok", "no cgroup limits the memory")
    limit, used, where = min(found)
    fact = f"{where} allows {ByteSize(limit)}, {ByteSize(used)} used, caches included"
    if used > _ALMOST * limit:
        advice = "give the container L1 + 512 MiB or more, or lower [l1] capacity"
        return Finding("memory.cgroup", "warn", fact, advice)
    return Finding("memory.cgroup", "ok", fact)


def _limits(line: str, cgroups: Path) -> Iterator[tuple[int, int, str]]:
    """Limit, use and place of the groups above this process; the names of the files differ between versions 1 and 2."""
    _, _, rest = line.partition(":")
    controllers, _, group = rest.partition(":")
    if controllers == "":
        root, names = cgroups, ("memory.max", "memory.current")
    elif "memory" in controllers.split(","):
        root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
    else:
        return
    folder = root / group.strip("/")
    for each in (folder, *folder.parents):
        limit, used = (_text(each / name).strip() for name in names)
        if limit.isdigit() and used.isdigit() and int(limit) < 1 << 62:  # version 1 writes "no limit" as a huge number
            yield int(limit), int(used), str(each)
        if each == root:
            return


def _memfd() -> Finding:
    try:
        descriptor = os.memfd_create("kvframework-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            mmap.mmap(descriptor, mmap.PAGESIZE, mmap.MAP_SHARED).close()
        finally:
            os.close(descriptor)
    except (OSError, AttributeError) as error:
        return Finding("memory.memfd", "fail", f"a memfd cannot be created: {error}", "L1 needs Linux and memfd_create")
    return Finding("memory.memfd", "ok", "a memfd can be created and mapped; /dev/shm does not matter")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
