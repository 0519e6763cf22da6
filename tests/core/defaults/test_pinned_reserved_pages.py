"""An arena of the machine's reserved huge pages (hugetlb). These tests change no setting: where fewer than `NEEDED`
pages are free, they skip."""

from __future__ import annotations

import logging
import mmap
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

import kvf_pinned
from kvf_dev.testing import MemoryConformance
from kvf_pinned import kvf_memories, nodes
from kvf_pinned.memory import MemfdArena
from kvf_pinned.nodes import Choice, HugePages, Pages, PinnedOptions, place, read_pool
from kvframework.api.memory import Memory, MemoryContext, huge_page_bytes
from kvframework.api.plugin import ByteSize
from kvframework.client.arena_mapping import MappedArena
from kvframework.errors import ArenaError
from kvframework.keeper.sd_notify import free_memory
from tests.core.defaults.test_pinned import works
from tests.core.restart.prompts import hits, store
from tests.support.held_server import HeldServer
from tests.support.waiting import wait_until

# The conformance kit has two arenas of 40 MiB at a time, and engines of one that has ended.
NEEDED = 64
PAGE = huge_page_bytes()


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough pages for these tests, whose arenas are small."""
    monkeypatch.setattr(nodes, "_LEAST_PAGES", 1)
    if not read_pool().holds(NEEDED * PAGE):
        pytest.skip(f"{read_pool()}, and {NEEDED} are needed: sysctl vm.nr_hugepages={NEEDED}")


def make(capacity: int, wanted: HugePages = "auto", kept: int | None = None) -> Memory:
    (provider,) = kvf_memories()
    options = PinnedOptions(capacity=ByteSize(capacity), huge_pages=wanted)
    return provider.create(options, MemoryContext(where="[l1]", kept=kept))


def of_reserved_pages(fd: int) -> bool:
    return os.fstatvfs(fd).f_bsize == PAGE


class TestReserved(MemoryConformance):
    use = "pinned"
    options: ClassVar[Mapping[str, object]] = {"huge_pages": "on"}


@pytest.fixture
def arena() -> Iterator[Memory]:
    arena = make(5 * PAGE + 1)
    yield arena
    arena.close()


def test_an_arena_is_rounded_to_whole_pages_which_are_its_own_from_the_beginning(arena: Memory) -> None:
    assert of_reserved_pages(arena.fd)
    assert arena.capacity == 6 * PAGE == os.fstat(arena.fd).st_size
    before = read_pool()
    works(arena)
    assert os.fstat(arena.fd).st_blocks * 512 == arena.capacity
    assert read_pool() == before
    arena.close()
    wait_until(lambda: read_pool().free == before.free + 6)


def test_its_pages_are_placed_where_the_options_say() -> None:
    """For this size the kernel keeps the policy with the mapping, by which the server makes all of them resident."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            place(page, [0])
        except OSError as error:
            pytest.skip(f"mbind is not to be had here: {error.strerror}")
    arena = MemfdArena(4 * PAGE, choice=Choice((0,), "as in this test"), pages=Pages("reserved", "as in this test"))
    works(arena)
    maps = Path("/proc/self/numa_maps").read_text()
    arena.close()
    assert re.search(r"^\w+ prefer:0 file=/memfd:kvframework-l1.* huge ", maps, re.MULTILINE), maps


@pytest.mark.parametrize("wanted", ["off", "transparent"])
def test_none_are_taken_where_they_are_not_wanted(wanted: HugePages) -> None:
    arena = make(5 * PAGE + 1, wanted)
    assert not of_reserved_pages(arena.fd)
    arena.close()


def test_where_others_have_them_the_arena_has_usual_pages_and_the_log_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kvf_pinned, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(kvf_pinned, "choose_pages", lambda *_: Pages("small", "as in this test"))
    free = read_pool().free
    others = MemfdArena((free - 3) * PAGE, pages=Pages("reserved", "as in this test"))
    try:
        with caplog.at_level(logging.WARNING):
            arena = make(4 * PAGE)
        assert not of_reserved_pages(arena.fd)
        arena.close()
        (line,) = caplog.messages
        assert re.fullmatch(r"\[l1\]: no reserved pages .*: 3 of \d+ reserved pages are free", line)
        with pytest.raises(ArenaError, match="3 of") as caught:
            make(4 * PAGE, "on")
        assert "sysctl vm.nr_hugepages=" in caught.value.hint
    finally:
        others.close()


def test_a_pool_that_was_emptied_meanwhile_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses the mapping; nothing is promised that is not there."""
    monkeypatch.setattr(kvf_pinned, "wait_for_pool", lambda *_: True)
    others = MemfdArena((read_pool().free - 3) * PAGE, pages=Pages("reserved", "as in this test"))
    try:
        arena = make(4 * PAGE)
        assert not of_reserved_pages(arena.fd)
        arena.close()
    finally:
        others.close()


def test_a_server_waits_for_the_engines_of_the_one_before() -> None:
    """They unmap its arena once their copies are done."""
    held = MemfdArena((read_pool().free - 3) * PAGE, pages=Pages("reserved", "as in this test"))
    program = "import mmap, sys; memory = mmap.mmap(int(sys.argv[1]), 0); print(flush=True); sys.stdin.read(1)"
    command = [sys.executable, "-c", program, str(held.fd)]
    with subprocess.Popen(command, pass_fds=[held.fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        assert engine.stdin is not None
        engine.stdout.readline()
        held.close()
        assert not read_pool().holds(4 * PAGE)
        engine.stdin.close()
        arena = make(4 * PAGE)
    assert of_reserved_pages(arena.fd)
    arena.close()


def test_an_engine_does_not_map_them_ahead(arena: Memory) -> None:
    """It would never end: of such a file `mincore` shows only what is mapped in this process already."""
    engine = MappedArena(os.dup(arena.fd), None)
    engine.map_ahead()
    assert "kvf-map-ahead" not in {thread.name for thread in threading.enumerate()}


WRITER = """
import mmap, os, sys
fd = int(sys.argv[1])
memory = mmap.mmap(fd, 0)
memory[:] = bytes(len(memory))
os.close(fd)
print(flush=True)
sys.stdin.read(1)
memory[:] = bytes([7]) * len(memory)
print(memory[-1])
"""


def test_an_engine_writes_on_to_an_arena_that_was_set_aside(arena: Memory) -> None:
    """A next server that begins empty frees the memory. Then it may have all reserved pages, and the engine's next
    write would be its end."""
    command = [sys.executable, "-c", WRITER, str(arena.fd)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, pass_fds=[arena.fd], stdin=pipe, stdout=pipe, text=True) as engine:
        assert engine.stdout is not None
        assert engine.stdin is not None
        engine.stdout.readline()
        free_memory(arena.fd)
        arena.close()
        others = MemfdArena(read_pool().free * PAGE, pages=Pages("reserved", "as in this test"))
        engine.stdin.write("x")
        engine.stdin.close()
        assert engine.stdout.read() == "7\n"
        others.close()
    assert engine.returncode == 0


def test_kept_memory_stays_as_it_is() -> None:
    """Whatever the machine has meanwhile."""
    for wanted, reserved in (("auto", True), ("transparent", False)):
        before = make(5 * PAGE + 1, wanted)
        kept = os.dup(before.fd)
        with before.view() as view:
            view[3 * PAGE] = 7
        before.close()
        after = make(5 * PAGE + 1, kept=kept)
        assert of_reserved_pages(after.fd) is reserved
        with after.view() as view:
            assert view[3 * PAGE] == 7
        after.close()


def reserved_bytes(pid: int) -> int:
    """What the process has mapped of such pages, by its own page tables."""
    (kib,) = re.findall(r"^HugetlbPages:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(kib) * 1024


def test_a_killed_servers_objects_are_found_in_reserved_pages() -> None:
    with HeldServer("l1.huge_pages=on", capacity="16MiB") as server:
        numbers = range(1, 9)
        with server.client() as client:
            store(client, 1, numbers)
            assert reserved_bytes(os.getpid()) > 0
            wait_until(lambda: "the arena has reserved pages of" in server.log)
        server.has_served()
        server.kill9()
        server.start()
        assert server.recovered()["objects"] == len(numbers)
        with server.client() as client:
            assert hits(client, 2, numbers) == len(numbers)
        wait_until(lambda: server.status()["l1"]["ready_bytes"] == 16 << 20)
