"""Which pages the arena gets, on machines that are made up, and that the kernel then maps transparent ones as such."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest

from kvf_pinned import kvf_memories
from kvf_pinned.advice import diagnose
from kvf_pinned.memory import MemfdArena, check_pages
from kvf_pinned.nodes import SMALL, TURN_ON, HugePages, Pages, PinnedOptions, choose_pages, read_pool
from kvframework.api.memory import MemoryContext, huge_page_bytes, map_shared
from kvframework.api.plugin import ByteSize, Finding
from kvframework.errors import ArenaError
from tests.core.defaults.test_pinned import works
from tests.support.processes import ran

MIB = 1 << 20


def machine(root: Path, for_all: str = "", for_this_size: str = "", pool: tuple[int, int, int] | None = None) -> Path:
    """`pool` is the number uses reserved pages, of free ones, and of those of them that were promised."""
    if pool is not None:
        reserved = root / f"kernel/mm/hugepages/hugepages-{huge_page_bytes() >> 10}kB"
        reserved.mkdir(parents=True)
        for name, number in zip(("nr", "free", "resv"), pool, strict=True):
            (reserved / f"{name}_hugepages").write_text(f"{number}\n")
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
        ("", "", False, "the kernel has no huge pages for shared memory"),
    ],
)
def test_auto_takes_what_the_kernel_gives(
    tmp_path: Path, for_all: str, for_this_size: str, huge: bool, reason: str
) -> None:
    made = machine(tmp_path, for_all, for_this_size)
    expected = Pages("transparent" if huge else "small", reason)
    assert choose_pages("auto", 64 * MIB, made) == choose_pages("on", 64 * MIB, made) == expected
    assert choose_pages("transparent", 64 * MIB, made) == expected
    assert choose_pages("off", 64 * MIB, made) == SMALL


@pytest.mark.parametrize(
    ("pool", "kind", "reason"),
    [
        ((32, 32, 0), "reserved", "32 of 32 reserved pages are free"),
        # An earlier server has them, whose end is near.
        ((32, 0, 0), "reserved", "0 of 32 reserved pages are free"),
        ((40, 35, 5), "reserved", "30 of 40 reserved pages are free"),
        ((31, 31, 0), "transparent", "shmem_enabled is advise; 31 of 31 reserved pages are free, 32 are needed"),
        ((0, 0, 0), "transparent", "shmem_enabled is advise"),
    ],
)
def test_reserved_pages_come_first_where_they_are_enough(
    tmp_path: Path, pool: tuple[int, int, int], kind: str, reason: str
) -> None:
    nbytes = 31 * huge_page_bytes() + 1
    made = machine(tmp_path, "advise", pool=pool)
    assert choose_pages("auto", nbytes - 1, made, tmp_path).kind == "transparent"  # nothing to gain
    for wanted in ("auto", "on"):
        assert choose_pages(wanted, nbytes, made, tmp_path) == (kind, reason)
    assert choose_pages("transparent", nbytes, made, tmp_path) == ("transparent", "shmem_enabled is advise")
    assert choose_pages("off", nbytes, made, tmp_path) == SMALL


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", ["", "rsvd."])
def test_no_more_reserved_pages_than_the_cgroup_allows(tmp_path: Path, version: int, kind: str) -> None:
    """In a container that asks Kubernetes for none that is 0: a page that is promised could still not be had."""
    made = machine(tmp_path, "never", pool=(64, 60, 0))
    size = f"hugetlb.{huge_page_bytes() >> 20}MB.{kind}"
    membership, root, files = {
        1: ("3:cpuset,hugetlb:/pod/one\n", made / "fs/cgroup/hugetlb", ("limit_in_bytes", "usage_in_bytes")),
        2: ("0::/pod/one\n", made / "fs/cgroup", ("max", "current")),
    }[version]
    (root / "pod/one").mkdir(parents=True)
    (made / "self").mkdir()
    (made / "self/cgroup").write_text(membership)
    (root / "pod/one" / (size + files[0])).write_text("max\n")
    (root / "pod" / (size + files[0])).write_text(f"{32 * huge_page_bytes()}\n")
    (root / "pod" / (size + files[1])).write_text(f"{2 * huge_page_bytes()}\n")
    pool = read_pool(made, made)
    assert (pool, pool.could_hold(32 * huge_page_bytes()), pool.holds(32 * huge_page_bytes())) == (
        (64, 60, 32, 30),
        True,
        False,
    )
    assert str(pool) == "30 of 32 reserved pages are free, as the cgroup allows, of 64"
    assert choose_pages("auto", 33 * huge_page_bytes(), made, made).kind == "small"


def test_a_small_arena_leaves_them_unless_it_must_have_huge_ones(tmp_path: Path) -> None:
    made = machine(tmp_path, "never", pool=(8, 8, 0))
    assert choose_pages("auto", MIB, made, tmp_path) == ("small", "shmem_enabled is never")
    assert choose_pages("on", MIB, made, tmp_path).kind == "reserved"


def test_on_refuses_a_machine_without(tmp_path: Path) -> None:
    without = machine(tmp_path / "without", "never")
    with pytest.raises(ArenaError) as caught:
        check_pages("on", MIB, where="[l1]", sysfs=without)
    assert (caught.value.where, caught.value.fact) == ("[l1]", "no huge pages: shmem_enabled is never")
    assert TURN_ON in caught.value.hint
    assert "auto" in caught.value.hint
    assert check_pages("auto", MIB, where="[l1]", sysfs=without) == Pages("small", "shmem_enabled is never")
    with_them = machine(tmp_path / "with", "advise")
    assert check_pages("on", MIB, where="[l1]", sysfs=with_them).kind == "transparent"


def test_a_server_without_them_does_not_start_with_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvf_pinned.memory.choose_pages", lambda *_: Pages("small", "shmem_enabled is never"))
    (provider,) = kvf_memories()
    table = PinnedOptions(capacity=ByteSize(4 * MIB), huge_pages="on")
    assert provider.check is not None
    for refuses in (provider.check, provider.create):
        with pytest.raises(ArenaError, match="no huge pages"):
            refuses(table, MemoryContext(where="[l1]"))


OF_TABLES = "of page tables for each process that maps all of it"


def finding(made: Path, wanted: HugePages = "auto") -> Finding:
    table = PinnedOptions(capacity=ByteSize(64 << 30), huge_pages=wanted)
    return next(each for each in diagnose(table, made, made) if each.id == "pinned.huge_pages")


def test_the_doctor_says_which_and_what_the_page_tables_take(tmp_path: Path) -> None:
    needed = (64 << 30) // huge_page_bytes()
    small = finding(machine(tmp_path / "small", "never", pool=(10, 3, 1)))
    assert small.level == "ok"
    assert small.fact == (
        f"the arena has pages of 4.0 KiB, 128.0 MiB {OF_TABLES}: "
        f"shmem_enabled is never; 2 of 10 reserved pages are free, {needed} are needed"
    )
    assert small.advice == f"{TURN_ON}, or sysctl vm.nr_hugepages={needed + 8}"
    assert finding(machine(tmp_path / "off", "never"), "off").advice == ""
    transparent = finding(machine(tmp_path / "transparent", "advise"))
    assert transparent.level == "ok"
    assert transparent.fact.startswith("the arena has transparent pages of 2.0 MiB, 256.0 KiB of page tables")
    assert transparent.advice == ""
    reserved = finding(machine(tmp_path / "reserved", "never", pool=(needed + 2, needed, 0)))
    assert (reserved.level, reserved.advice) == ("ok", "")
    assert reserved.fact == (
        f"the arena has reserved pages of 2.0 MiB, 256.0 KiB {OF_TABLES}: "
        f"{needed} of {needed + 2} reserved pages are free"
    )


def test_the_doctor_warns_of_reserved_pages_that_others_have(tmp_path: Path) -> None:
    needed = (64 << 30) // huge_page_bytes()
    taken = finding(machine(tmp_path, "never", pool=(needed, 100, 0)))
    assert taken.level == "warn"
    assert f"100 of {needed} reserved pages are free" in taken.fact
    assert f"sysctl vm.nr_hugepages={2 * needed - 100}" in taken.advice


@pytest.mark.parametrize("pages", [SMALL, Pages("transparent", "as in this test")])
def test_an_arena_works_with_either(pages: Pages) -> None:
    arena = MemfdArena(5 * MIB + 1, pages=pages)
    works(arena)
    with arena.view() as view, memoryview(mmap.mmap(arena.fd, arena.capacity)) as other:
        view[0], view[-1] = 7, 9
        assert (other[0], other[-1], len(view)) == (7, 9, 5 * MIB + 1)
    arena.close()


def test_a_mapping_that_cannot_be_aligned_is_a_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.memfd_create("arena")
    os.ftruncate(fd, 5 * MIB)
    monkeypatch.setattr("kvframework.api.memory._mmap", lambda *_: (1 << 64) - 1)
    mapping = map_shared(fd, 5 * MIB)
    with mapping.view() as view:
        view[5] = 7
    assert (mapping.begin, len(mapping.memory), os.pread(fd, 1, 5)) == (0, 5 * MIB, b"\7")
    mapping.memory.close()
    os.close(fd)


def test_what_the_kernel_does_not_tell_is_the_usual_size(tmp_path: Path) -> None:
    assert huge_page_bytes(tmp_path) == 2 * MIB
    assert Pages("small", "").tables(1 << 30) == (1 << 30) // mmap.PAGESIZE * 8


PROGRAM = """
import mmap, os, re, subprocess, sys
from pathlib import Path
from kvf_pinned.memory import Toucher
from kvframework.api.memory import map_shared
from kvframework.client.arena_mapping import MappedArena
from kvframework.client.arena_mapping import _map_step

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
        done = ran(*command, code=None)
    except OSError as error:
        pytest.skip(f"no unshare: {error}")
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"a file system may not be mounted here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'8192'") == 2
