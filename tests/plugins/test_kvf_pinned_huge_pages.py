"""Whether the arena gets huge pages, on machines that are made up, and that the kernel then maps them as such."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvf_pinned import huge_pages, kvf_memories
from kvf_pinned.advice import diagnose
from kvf_pinned.huge_pages import SMALL, TURN_ON, Pages, choose_pages
from kvf_pinned.memory import MemfdArena, check_pages
from kvf_pinned.options import PinnedOptions
from kvframework.api.memory import MemoryContext
from kvframework.api.options import ByteSize
from kvframework.api.shared_mapping import huge_page_bytes, map_shared
from kvframework.errors import ArenaError
from tests.support.waiting import wait_until

MIB = 1 << 20


def machine(root: Path, for_all: str = "", for_this_size: str = "") -> Path:
    folder = root / "kernel/mm/transparent_hugepage"
    (folder / "hugepages-2048kB").mkdir(parents=True)
    words = ["always", "inherit", "within_size", "advise", "never", "deny", "force"]
    for chosen, file in ((for_all, folder), (for_this_size, folder / "hugepages-2048kB")):
        if chosen:
            (file / "shmem_enabled").write_text(" ".join(f"[{word}]" if word == chosen else word for word in words))
    return root


@pytest.mark.parametrize(
    ("for_all", "for_this_size", "huge", "reason"),
    [
        ("advise", "", True, "shmem_enabled is advise"),
        ("always", "inherit", True, "shmem_enabled is always"),
        ("within_size", "", True, "shmem_enabled is within_size"),
        ("never", "", False, "shmem_enabled is never"),
        ("deny", "", False, "shmem_enabled is deny"),
        ("never", "advise", True, "shmem_enabled is advise"),
        ("advise", "never", False, "shmem_enabled is never"),
        ("", "", False, "the kernel has none for shared memory"),
    ],
)
def test_auto_takes_what_the_kernel_gives(
    tmp_path: Path, for_all: str, for_this_size: str, huge: bool, reason: str
) -> None:
    made = machine(tmp_path, for_all, for_this_size)
    assert choose_pages("auto", made) == choose_pages("on", made) == Pages(huge, reason)
    assert choose_pages("off", made) == SMALL


def test_on_refuses_a_machine_without(tmp_path: Path) -> None:
    without = machine(tmp_path / "without", "never")
    with pytest.raises(ArenaError) as caught:
        check_pages("on", where="[l1]", sysfs=without)
    assert (caught.value.where, caught.value.fact) == ("[l1]", "no huge pages: shmem_enabled is never")
    assert TURN_ON in caught.value.hint
    assert "auto" in caught.value.hint
    assert check_pages("auto", where="[l1]", sysfs=without) == Pages(False, "shmem_enabled is never")
    assert check_pages("on", where="[l1]", sysfs=machine(tmp_path / "with", "advise")).huge


def test_a_server_without_them_does_not_start_with_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvf_pinned.memory.choose_pages", lambda *_: Pages(False, "shmem_enabled is never"))
    (provider,) = kvf_memories()
    table = PinnedOptions(capacity=ByteSize(4 * MIB), huge_pages="on")
    assert provider.check is not None
    for refuses in (provider.check, provider.create):
        with pytest.raises(ArenaError, match="no huge pages"):
            refuses(table, MemoryContext(where="[l1]"))


def test_the_doctor_says_which_and_what_the_page_tables_take(tmp_path: Path) -> None:
    table = PinnedOptions(capacity=ByteSize(64 << 30))
    small, huge = (
        next(each for each in diagnose(table, machine(tmp_path / word, word)) if each.id == "pinned.huge_pages")
        for word in ("never", "advise")
    )
    assert small.level == huge.level == "ok"
    assert small.fact == (
        "the arena has pages of 4.0 KiB, 128.0 MiB of page tables for each process that maps all of it: "
        "shmem_enabled is never"
    )
    assert small.advice == TURN_ON
    assert huge.fact.startswith("the arena has pages of 2.0 MiB, 256.0 KiB of page tables")
    assert huge.advice == ""


@pytest.mark.parametrize("pages", [SMALL, Pages(True, "as in this test")])
def test_an_arena_works_with_either(pages: Pages) -> None:
    arena = MemfdArena(5 * MIB + 1, pages=pages)
    ready: list[int] = []
    arena.start(ready.append)
    wait_until(lambda: ready and ready[-1] == arena.capacity)
    with arena.view() as view, memoryview(mmap.mmap(arena.fd, arena.capacity)) as other:
        view[0], view[-1] = 7, 9
        assert (other[0], other[-1], len(view)) == (7, 9, 5 * MIB + 1)
    arena.close()


def test_a_mapping_that_cannot_be_aligned_is_a_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.memfd_create("arena")
    os.ftruncate(fd, 5 * MIB)
    monkeypatch.setattr("kvframework.api.shared_mapping._mmap", lambda *_: (1 << 64) - 1)
    mapping = map_shared(fd, 5 * MIB)
    with mapping.view() as view:
        view[5] = 7
    assert (mapping.begin, len(mapping.memory), os.pread(fd, 1, 5)) == (0, 5 * MIB, b"\7")
    mapping.memory.close()
    os.close(fd)


def test_what_the_kernel_does_not_tell_is_the_usual_size(tmp_path: Path) -> None:
    assert huge_page_bytes(tmp_path) == 2 * MIB
    assert huge_pages.Pages(False, "").tables(1 << 30) == (1 << 30) // mmap.PAGESIZE * 8


PROGRAM = """
import mmap, os, re, subprocess, sys
from pathlib import Path
from kvf_pinned.touch import Toucher
from kvframework.api.shared_mapping import map_shared
from kvframework.client.connecting.arena_mapping import MappedArena
from kvframework.client.connecting.resident_pages import _map_step

done = subprocess.run(["mount", "-t", "tmpfs", "-o", "huge=advise,size=64m", "none", sys.argv[1]])
if done.returncode:
    sys.exit(77)
fd = os.open(sys.argv[1], os.O_TMPFILE | os.O_RDWR)
os.ftruncate(fd, 8 << 20)
server = map_shared(fd, 8 << 20)
server.advise(mmap.MADV_HUGEPAGE)
Toucher(server, fd).touch(0, 8 << 20)
engine = MappedArena(os.dup(fd), None)
import weakref
for begin in range(0, 8 << 20, 2 << 20):
    assert _map_step(weakref.ref(engine), begin)
print(re.findall(r"ShmemPmdMapped: +(\\d+) kB", Path("/proc/self/smaps").read_text()))
"""


def test_huge_pages_of_a_file_are_mapped_as_such_in_server_and_engine(tmp_path: Path) -> None:
    """On a file system of this test's own, which has them, whatever the machine's setting."""
    folder = tmp_path / "huge"
    folder.mkdir()
    command = ["unshare", "--mount", sys.executable, "-c", PROGRAM, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no unshare: {error}")
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"a file system may not be mounted here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'8192'") == 2
