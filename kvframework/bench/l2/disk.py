"""Owns the part `disk`: put and get of the filesystem tier beside plain sequential writes and reads.

Every file is written anew, and is on the disk before the next measurement begins. Plain reads are of the tier's files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from kvframework.api import ByteSize
from kvframework.bench.attempt import NotMeasured
from kvframework.bench.interleave import interleave
from kvframework.bench.l2.disk_files import DiskFiles, Mode, open_files
from kvframework.bench.l2.document import DiskFigures, DiskRow
from kvframework.bench.l2.sizes import Sizes
from kvframework.bench.plain_files import can_bypass_cache, file_system
from kvframework.bench.progress import Stage
from kvframework.bench.statistics import Rounds, rate_gb_s, ratio
from kvframework.bench.values import Values
from kvframework.registry import PluginRegistry

# The share of their pages up to which files count as not cached: the kernel may keep a few.
COLD = 0.01
_ON_A_DISK = "name a folder on a disk: --folder DIR"

_DEFAULT = Mode("write, past the page cache", direct=True, sync=False)
_BUFFERED = Mode("write, into the page cache", direct=False, sync=False)
_SYNCED = Mode("write, fdatasync each", direct=False, sync=True)
_COLD_READ = "read, cold"


def bench_disk(
    sizes: Sizes, folder: Path, registry: PluginRegistry, not_measured: list[NotMeasured], stage: Stage
) -> DiskFigures:
    """Raises `BenchFailed`, `WrongBytes` and `OSError`. All files are below `folder`, which is left as it was."""
    kind = file_system(folder)
    modes = [_DEFAULT, _BUFFERED, _SYNCED]
    if not can_bypass_cache(folder):
        not_measured.append(NotMeasured(modes.pop(0).title, f"{kind} does not bypass the page cache", _ON_A_DISK))
    rows = []
    for nbytes in sizes.value_bytes:
        values = Values(nbytes, max(sizes.call_bytes // nbytes, 1))
        with stage(f"values of {ByteSize(nbytes)} on the disk", sizes.disk_rounds * (len(modes) + 2)) as advance:
            for mode in modes:
                with open_files(folder, registry, values, mode) as files:
                    measured = interleave(
                        {"tier": files.put, "plain": files.write_plain}, rounds=sizes.disk_rounds, advance=advance
                    )
                    rows.append(_row(mode.title, values, measured, files.cached_now()))
                    files.verify()
            with open_files(folder, registry, values, _BUFFERED) as files:
                files.put()
                rows += _reads(files, values, sizes.disk_rounds, advance)
                files.verify()
    for claim in (_DEFAULT.title, _COLD_READ):
        if any(row.cached > COLD for row in rows if row.operation == claim):
            rows = [row for row in rows if row.operation != claim]
            not_measured.append(NotMeasured(claim, f"{kind} keeps the files in the page cache", _ON_A_DISK))
    return DiskFigures(kind, rows)


def _reads(files: DiskFiles, values: Values, rounds: int, advance: Callable[[], None]) -> list[DiskRow]:
    cold = interleave(
        {"tier": files.cold(files.get), "plain": files.cold(files.read_plain)}, rounds=rounds, advance=advance
    )
    files.read_plain()
    warm = interleave({"tier": files.get, "plain": files.read_plain}, rounds=rounds, advance=advance)
    return [
        _row(_COLD_READ, values, cold, files.cached),
        _row("read, from the page cache", values, warm, files.cached_now()),
    ]


def _row(operation: str, values: Values, measured: Mapping[str, Rounds], cached: float) -> DiskRow:
    return DiskRow(
        operation=operation,
        value_bytes=values.nbytes,
        nbytes=values.total,
        plain_gb_s=rate_gb_s(values.total, measured["plain"]),
        tier_gb_s=rate_gb_s(values.total, measured["tier"]),
        of_plain=ratio(measured["plain"], measured["tier"]),
        cached=cached,
    )
