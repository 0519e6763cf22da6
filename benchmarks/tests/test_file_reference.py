"""Plain files and the page cache, on whatever file system the tests run on; and the peak of a process."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from kvframework_bench.l2.file_reference import (
    cached_share,
    can_bypass_cache,
    drop_from_cache,
    file_system,
    read_files,
    settle,
    write_files,
)
from kvframework_bench.l2.tier import Values
from kvframework_bench.prefix import shape_of
from kvframework_bench.server import PeakMeter, parse_peak

NBYTES = 3 << 20


@pytest.mark.parametrize("direct", [False, True])
def test_files_are_read_as_they_were_written(tmp_path: Path, direct: bool) -> None:
    if direct and not can_bypass_cache(tmp_path):
        pytest.skip("no O_DIRECT here")
    values = Values(NBYTES, 2)
    paths = [tmp_path / "0", tmp_path / "1"]
    assert write_files(paths, values.sources, direct=direct, sync=True) > 0
    assert read_files(paths, values.targets) > 0
    values.verify("plain files")
    with pytest.raises(FileExistsError):
        write_files(paths, values.sources, direct=direct, sync=False)


def test_what_is_in_the_page_cache_is_known(tmp_path: Path) -> None:
    paths = [tmp_path / "here"]
    write_files(paths, Values(NBYTES, 1).sources, direct=False, sync=False)
    settle(paths)
    assert cached_share(paths) == 1.0
    drop_from_cache(paths)
    left = cached_share(paths)
    assert left == (1.0 if file_system(tmp_path) in ("tmpfs", "ramfs") else 0.0)
    assert cached_share(paths) == left, "looking must not read"
    with paths[0].open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.seek(mmap.PAGESIZE)
        file.read(1)
    assert cached_share(paths) > 0


def test_file_systems_have_names(tmp_path: Path) -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(tmp_path)


def test_a_peak_is_seen_after_it_has_passed() -> None:
    meter = PeakMeter(os.getpid())
    data = b"\1" * (64 << 20)
    del data
    assert meter.growth() > 60 << 20


def test_a_status_without_a_peak_is_refused() -> None:
    assert parse_peak("VmPeak:\t 9 kB\nVmHWM:\t     512 kB\n") == 512 << 10
    with pytest.raises(ValueError, match="VmHWM"):
        parse_peak("Name:\tkthreadd\n")


def test_shapes_have_the_objects_that_were_asked_for() -> None:
    shape = shape_of(32 << 20)
    assert (shape.num_layers, shape.hidden_dim_size) == (32, 1024)
    with pytest.raises(ValueError, match="no shape"):
        shape_of(1000)
