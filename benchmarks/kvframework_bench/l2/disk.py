"""The part `disk`: put and get of the filesystem tier next to plain sequential writes and reads.

The tier and plain files hold the same values, in two folders. Every file is written new, and is on the disk
before the next measurement begins. Plain reads are of the tier's files.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvframework.api.plugin import ByteSize
from kvframework.api.tier import Outcome, Tier
from kvframework.registry.registry import PluginRegistry
from kvframework.storage.namespaces import HEADER_BYTES
from kvframework_bench.console import Stage
from kvframework_bench.errors import BenchFailed, Skipped
from kvframework_bench.l2.figures import DiskFigures, DiskRow
from kvframework_bench.l2.file_reference import (
    cached_share,
    can_bypass_cache,
    drop_from_cache,
    file_system,
    read_files,
    settle,
    write_files,
)
from kvframework_bench.l2.sizes import Sizes
from kvframework_bench.l2.tier import Values, expect, keys_for, open_tier
from kvframework_bench.rounds import Case, Rounds, interleave, rate_gb_s, ratio, timed

_DEADLINE_S = 120.0
# A file of the tier has a head and padding next to its value.
_FILE_SLACK = 1 << 16


class Mode(NamedTuple):
    """A mode of writing, of the tier and of plain files: past the page cache, and with a sync each."""

    title: str
    direct: bool
    sync: bool

    @property
    def options(self) -> dict[str, object]:
        return {"direct": "auto" if self.direct else "off", "fsync": "data" if self.sync else "none"}


class DiskFiles:
    """The tier's files and the plain ones, made by `open_files`. Every call blocks; those that are cases return the
    seconds of the tier or of the plain file alone. `cached` is the largest share of the tier's files that was in the
    page cache before a cold read."""

    def __init__(self, tier: Tier, tier_folder: Path, plain_folder: Path, values: Values, mode: Mode) -> None:
        self.cached = 0.0
        self._tier = tier
        self._tier_folder = tier_folder
        self._plain_paths = [plain_folder / str(index) for index in range(len(values.sources))]
        self._values = values
        self._mode = mode
        self._rooms = [memoryview(bytearray(values.nbytes + _FILE_SLACK)) for _ in values.sources]
        self._keys = keys_for(len(values.sources), b"d")
        # As the core stores an object: after a separate header.
        self._headers = [memoryview(bytearray(HEADER_BYTES)) for _ in self._keys]

    @property
    def of_tier(self) -> list[Path]:
        """Return the files of the values. Raises `BenchFailed` if there is not one for each."""
        found = sorted(path for path in self._tier_folder.glob("*/*") if path.is_file())
        if len(found) != len(self._keys):
            raise BenchFailed(f"the tier holds {len(found)} files for {len(self._keys)} values")
        return found

    def put(self) -> float:
        """Write new files by the tier."""
        self._tier.delete(self._keys, deadline=_deadline())
        parts = [[header, source] for header, source in zip(self._headers, self._values.sources, strict=True)]
        seconds = timed(lambda: expect(self._tier.put(self._keys, parts, deadline=_deadline()), Outcome.STORED))
        settle(self.of_tier)
        return seconds

    def write_plain(self) -> float:
        """Write new plain files."""
        for path in self._plain_paths:
            path.unlink(missing_ok=True)
        seconds = write_files(self._plain_paths, self._values.sources, direct=self._mode.direct, sync=self._mode.sync)
        settle(self._plain_paths)
        return seconds

    def get(self) -> float:
        """Read by the tier."""
        parts = [[header, target] for header, target in zip(self._headers, self._values.targets, strict=True)]
        return timed(lambda: expect(self._tier.get_into(self._keys, parts, deadline=_deadline()), Outcome.FOUND))

    def read_plain(self) -> float:
        """Read the tier's files whole."""
        return read_files(self.of_tier, self._rooms)

    def cold(self, read: Case) -> Case:
        """Return `read` for files that are not in the page cache, if the kernel can drop them."""

        def run() -> float:
            drop_from_cache(self.of_tier)
            self.cached = max(self.cached, self.cached_now())
            return read()

        return run

    def cached_now(self) -> float:
        """Return the share of the tier's files that is in the page cache."""
        return cached_share(self.of_tier)

    def verify(self) -> None:
        """Raise `WrongBytes` unless the tier returns the stored values."""
        self._values.poison()
        self.get()
        self._values.verify("the filesystem tier")


@contextmanager
def open_files(folder: Path, registry: PluginRegistry, values: Values, mode: Mode) -> Iterator[DiskFiles]:
    """Open two new folders below `folder`, which are removed at the end of the context."""
    tier_folder, plain_folder = folder / "tier", folder / "plain"
    plain_folder.mkdir()
    try:
        options = {"path": str(tier_folder), "capacity": str(4 * values.total), **mode.options}
        with open_tier(registry, "filesystem", options) as tier:
            yield DiskFiles(tier, tier_folder, plain_folder, values, mode)
    finally:
        for each in (tier_folder, plain_folder):
            shutil.rmtree(each, ignore_errors=True)


def _deadline() -> float:
    return time.monotonic() + _DEADLINE_S


# The share of their pages up to which files count as not cached: the kernel may keep a few.
COLD = 0.01
_ON_A_DISK = "give a folder on a disk: --folder DIR"

_DEFAULT = Mode("write, past the page cache", direct=True, sync=False)
_BUFFERED = Mode("write, into the page cache", direct=False, sync=False)
_SYNCED = Mode("write, fdatasync each", direct=False, sync=True)
_COLD_READ = "read, cold"


def bench_disk(
    sizes: Sizes, folder: Path, registry: PluginRegistry, skipped: list[Skipped], stage: Stage
) -> DiskFigures:
    """Measure the tier. Raises `BenchFailed`, `WrongBytes` and `OSError`. All files are below `folder`, which is
    unchanged afterwards."""
    kind = file_system(folder)
    modes = [_DEFAULT, _BUFFERED, _SYNCED]
    if not can_bypass_cache(folder):
        skipped.append(
            Skipped(modes.pop(0).title, f"the file system {kind} does not bypass the page cache", _ON_A_DISK)
        )
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
            skipped.append(Skipped(claim, f"the file system {kind} keeps the files in the page cache", _ON_A_DISK))
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
        reference_gb_s=rate_gb_s(values.total, measured["plain"]),
        tier_gb_s=rate_gb_s(values.total, measured["tier"]),
        ratio_to_reference=ratio(measured["plain"], measured["tier"]),
        cached=cached,
    )
