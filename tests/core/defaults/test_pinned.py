"""The arena: shared, sealed, made resident in the background, refused when it does not fit, and gone after close."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvf_dev.testing import MemoryConformance
from kvf_pinned import memory
from kvf_pinned.memory import MemfdArena
from kvf_pinned.nodes import PinnedOptions
from kvframework.api.memory import Memory, available_memory
from kvframework.api.plugin import ByteSize
from kvframework.errors import ArenaError
from tests.support.waiting import wait_until

MIB = 1 << 20


def options(table: dict[str, object]) -> PinnedOptions:
    return msgspec.convert(table, PinnedOptions, dec_hook=lambda _, value: ByteSize.parse(value))


@pytest.fixture
def arena() -> Iterator[MemfdArena]:
    arena = MemfdArena(40 * MIB + 12_345)
    yield arena
    arena.close()


def works(arena: Memory) -> None:
    """Until all of it is resident."""
    ready: list[int] = []
    arena.start(ready.append)
    wait_until(lambda: ready and ready[-1] == arena.capacity)


def resident_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def open_fds() -> set[str]:
    return {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if Path(f"/proc/self/fd/{fd}").is_symlink()
    }


class TestArena(MemoryConformance):
    use = "pinned"


def test_options() -> None:
    assert options({}).capacity == 1 << 30
    assert options({"capacity": "1.5 GiB"}).capacity == 3 << 29
    for bad in ("1000", "512 KiB", 0, -5, "much", 1.5, True):
        with pytest.raises(msgspec.ValidationError, match="capacity"):
            options({"capacity": bad})


def test_ready_grows_to_the_end_and_is_resident_by_then(arena: MemfdArena) -> None:
    assert resident_bytes(arena.fd) == 0
    seen: list[tuple[int, int, str]] = []
    arena.start(lambda ready: seen.append((ready, resident_bytes(arena.fd), threading.current_thread().name)))
    wait_until(lambda: seen and seen[-1][0] == arena.capacity)
    assert [ready for ready, _, _ in seen] == sorted({ready for ready, _, _ in seen})
    assert len(seen) == 3
    assert all(ready <= resident for ready, resident, _ in seen)
    assert {name for _, _, name in seen} == {"kvf-pinned"}


def mapped_bytes(arena: MemfdArena) -> list[int]:
    """What the page tables of this process have of the arena, for each time that it is mapped."""
    parts = Path("/proc/self/smaps").read_text().split("VmFlags:")
    own = [part for part in parts if re.search(rf" {os.fstat(arena.fd).st_ino} +/memfd:", part)]
    return [int(kib) * 1024 for part in own for kib in re.findall(r"^Rss: +(\d+) kB$", part, re.MULTILINE)]


@pytest.mark.parametrize("populates", [True, False])
def test_what_is_resident_is_not_to_be_unmapped_at_the_end_of_the_process(
    monkeypatch: pytest.MonkeyPatch, populates: bool
) -> None:
    """A next server of this arena waits for that, a tenth of a second a GiB."""
    if not populates:
        monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", 9999)
    arena = MemfdArena(40 * MIB + 12_345, outlives=True)
    kept = MemfdArena(arena.capacity, kept=os.dup(arena.fd))
    try:
        with arena.view() as view:
            view[5] = 7
            for each in (arena, kept):
                works(each)
            assert resident_bytes(arena.fd) >= arena.capacity
            assert mapped_bytes(arena) == [0, 0]
            assert view[5] == 7
    finally:
        kept.close()
        arena.close()


def test_untouched_bytes_are_zero(arena: MemfdArena) -> None:
    with arena.view() as view:
        assert not any(view[:12])
        assert view[-1] == 0


def test_no_client_can_change_the_size_or_the_seals(arena: MemfdArena) -> None:
    for size in (0, arena.capacity - 1, arena.capacity + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(arena.fd)


def test_memory_that_runs_out_on_the_way_is_told_and_what_is_ready_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, arena: MemfdArena
) -> None:
    whole = memory.Toucher.touch

    def scarce(self: memory.Toucher, start: int, end: int) -> None:
        if start:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        whole(self, start, end)

    monkeypatch.setattr(memory.Toucher, "touch", scarce)
    ready: list[int] = []
    with caplog.at_level(logging.ERROR):
        arena.start(ready.append)
        wait_until(lambda: caplog.records)
    assert ready == [16 * MIB]
    assert "stays at 16.0 MiB of 40.0 MiB: Cannot allocate memory; lower [l1] capacity" in caplog.text


def test_an_arena_beyond_the_memory_is_refused_at_once() -> None:
    before = open_fds()
    with pytest.raises(ArenaError) as caught:
        MemfdArena(1 << 50, where="[l1]")
    error = caught.value
    assert (error.where, error.hint) == ("[l1]", "lower [l1] capacity")
    assert "does not fit" in error.fact
    assert error.available.endswith("iB")
    assert open_fds() == before


def test_an_arena_that_cannot_be_mapped_is_refused_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvf_pinned.memory.available_memory", lambda: sys.maxsize)
    before = open_fds()
    for capacity in (1 << 62, sys.maxsize):
        with pytest.raises(ArenaError, match="cannot be made"):
            MemfdArena(capacity)
    assert open_fds() == before


def test_a_closed_arena_is_of_no_use() -> None:
    arena = MemfdArena(MIB)
    arena.close()
    assert arena.fd == -1
    with pytest.raises(ArenaError):
        arena.view()
    with pytest.raises(ArenaError):
        arena.start(lambda _: None)


def test_close_with_a_view_still_out_says_so_and_works_later() -> None:
    arena = MemfdArena(MIB)
    view = arena.view()
    with pytest.raises(BufferError, match=r"release every memoryview of view\(\)"):
        arena.close()
    view.release()
    arena.close()


def test_starting_twice_is_refused(arena: MemfdArena) -> None:
    arena.start(lambda _: None)
    with pytest.raises(ArenaError):
        arena.start(lambda _: None)


@pytest.mark.parametrize(
    ("membership", "files", "available"),
    [
        ("", {}, 1000 << 10),
        (
            "0::/pod/box\n",
            {
                "pod/box/memory.max": "max",
                "pod/box/memory.current": "5",
                "pod/memory.max": "600000",
                "pod/memory.current": "500000",
                "pod/memory.stat": "anon 1\ninactive_file 30000",
            },
            130_000,
        ),
        (
            "5:cpu,cpuacct:/\n4:memory:/docker/abc\n0::/\n",
            {
                "memory/memory.limit_in_bytes": "400000",
                "memory/memory.usage_in_bytes": "390000",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 5000",
            },
            15_000,
        ),
        ("0::/\n", {"memory.max": "100", "memory.current": "200"}, 0),
    ],
    ids=["no group", "the tightest above counts", "the first version of cgroups", "a full group"],
)
def test_available_memory_is_what_the_kernel_writes(
    tmp_path: Path, membership: str, files: dict[str, str], available: int
) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    assert available_memory(proc, groups) == sys.maxsize, "nothing readable is no limit"
    written = {proc / "meminfo": "MemTotal:  9000 kB\nMemFree: 10 kB\nMemAvailable:   1000 kB"}
    written |= {proc / "self" / "cgroup": membership, **{groups / name: text for name, text in files.items()}}
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert available_memory(proc, groups) == available


def test_leaving_ends_the_thread_and_unmaps_nothing() -> None:
    arena = MemfdArena(64 << 20)
    view = arena.view()
    arena.start(lambda _limit: None)
    arena.leave()
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "kvf-pinned"])
    view[:1] = b"x"
    view.release()
    arena.close()
