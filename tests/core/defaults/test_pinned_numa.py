"""On which NUMA nodes the arena is to lie, from machines that are made up, and that the kernel is told so."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import re
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest

from kvf_pinned import kvf_memories, nodes
from kvf_pinned.advice import diagnose, numa_findings
from kvf_pinned.memory import MemfdArena
from kvf_pinned.nodes import ANYWHERE, Choice, Numa, PinnedOptions, accelerators, choose, memory_nodes, place
from kvframework.api.memory import MemoryContext
from kvframework.api.plugin import ByteSize, Finding
from tests.core.defaults.sysfs import CONSOLE, CONSUMER_GPU, GPU, NETWORK, OTHER_ACCELERATOR, sysfs
from tests.core.defaults.test_pinned import works
from tests.support.processes import ran

NUMA_MAPS = Path("/proc/self/numa_maps")


# which nodes


@pytest.mark.parametrize(
    ("memory", "devices", "nodes", "reason"),
    [
        ("0-1", [(GPU, 1)], (1,), "these nodes have accelerators"),
        ("0-1", [(CONSUMER_GPU, 0), (NETWORK, 1), (CONSOLE, 1)], (0,), "these nodes have accelerators"),
        ("0-1,4,6-7", [(GPU, 7), (GPU, 7), (OTHER_ACCELERATOR, 4), (GPU, -1)], (4, 7), "these nodes have accelerators"),
        ("0-1", [(GPU, -1)], (), "no accelerator reports its NUMA node"),
        ("0-1", [(NETWORK, 0)], (), "no accelerator reports its NUMA node"),
        ("0,2", [(GPU, 1), (GPU, 3)], (), "the accelerators are on NUMA nodes 1, 3, where there is no memory"),
        ("0", [(GPU, 0)], (), "there is one NUMA node"),
        ("", [(GPU, 0)], (), "the kernel reports no NUMA nodes"),
    ],
)
def test_auto_follows_the_accelerators(
    memory: str, devices: list[tuple[tuple[str, str], int]], nodes: tuple[int, ...], reason: str, tmp_path: Path
) -> None:
    assert choose("auto", sysfs(tmp_path, memory, *devices)) == Choice(nodes, reason)


def test_what_is_configured_counts_more_than_what_is_seen(tmp_path: Path) -> None:
    machine = sysfs(tmp_path, "0-3", (GPU, 1))
    assert choose("off", machine) == ANYWHERE
    assert choose([3, 0, 3], machine) == Choice((0, 3), "the configuration names them")


def test_files_that_cannot_be_read_say_nothing(tmp_path: Path) -> None:
    assert not choose("auto", tmp_path / "none").nodes
    machine = sysfs(tmp_path, "0-1,some", (GPU, 1), (GPU, 0), (GPU, 0))
    devices = sorted((machine / "bus/pci/devices").iterdir())
    (devices[1] / "numa_node").write_text("?")
    (devices[2] / "class").unlink()
    assert (memory_nodes(machine), accelerators(machine).keys() - {-1}) == ([0, 1], {1})


def test_the_real_machine_can_be_read() -> None:
    assert set(choose("auto").nodes) <= set(memory_nodes())


def test_options() -> None:
    def numa(value: object) -> object:
        return msgspec.convert({"numa": value}, PinnedOptions).numa

    assert PinnedOptions().numa == "auto"
    assert [numa(each) for each in ("off", [1], [0, 1023])] == ["off", [1], [0, 1023]]
    for bad in ("some", [], [-1], [1024], ["0"], 0):
        with pytest.raises(msgspec.ValidationError, match="numa"):
            numa(bad)


# the call


@pytest.fixture
def permitted() -> None:
    """The kernel may be told about node 0, and says what it was told."""
    if not NUMA_MAPS.exists():
        pytest.skip(f"there is no {NUMA_MAPS}: this kernel knows no NUMA nodes")
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            place(page, [0])
        except OSError as error:
            pytest.skip(f"mbind is not to be had here: {error.strerror}")


def policies(numa_maps: str) -> list[str]:
    """Of every mapping of an arena."""
    return re.findall(r"^\w+ (\S+) file=/memfd:kvframework-l1", numa_maps, re.MULTILINE)


@contextmanager
def made(numa: Numa) -> Iterator[MemfdArena]:
    """By the provider, as the server does it, of pages of the usual size."""
    (provider,) = kvf_memories()
    arena = provider.create(PinnedOptions(ByteSize(4 << 20), numa, "off"), MemoryContext(where="[l1]"))
    assert isinstance(arena, MemfdArena)
    with closing(arena):
        yield arena


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.usefixtures("permitted")
def test_the_arena_is_placed_before_it_is_touched(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), made([0]) as arena:
        assert os.fstat(arena.fd).st_blocks == 0
        assert policies(NUMA_MAPS.read_text()) == ["prefer:0"]
        works(arena)
    assert [each.getMessage() for each in caplog.records if "has pages" not in each.getMessage()] == [
        "[l1]: the arena lies on NUMA node 0, while there is room: the configuration names them"
    ]


@pytest.mark.usefixtures("permitted")
def test_several_nodes_are_interleaved() -> None:
    """Of nodes that are not there the kernel says nothing as long as one is."""
    with made([0, 1]):
        (policy,) = policies(NUMA_MAPS.read_text())
        assert policy.startswith("interleave:0")


@pytest.mark.usefixtures("permitted")
def test_the_policy_is_that_of_every_process_that_maps_the_arena() -> None:
    program = (
        "import mmap, sys; from pathlib import Path\n"
        "segment = mmap.mmap(int(sys.argv[1]), 0); print(Path('/proc/self/numa_maps').read_text())"
    )
    with made([0]) as arena:
        done = ran(sys.executable, "-c", program, str(arena.fd), pass_fds=[arena.fd])
        assert policies(done.stdout) == ["prefer:0"]


@pytest.mark.usefixtures("permitted")
def test_a_node_that_is_not_there_is_told_and_the_arena_works(caplog: pytest.LogCaptureFixture) -> None:
    with made([1023]) as arena:
        works(arena)
        assert policies(NUMA_MAPS.read_text()) == ["default"]
    (line,) = warnings(caplog)
    assert line == (
        "[l1]: the kernel chooses the arena's NUMA nodes, because it refused NUMA node 1023: Invalid argument; "
        'name nodes of Mems_allowed_list in /proc/self/status, or set [l1] numa = "off"'
    )


def test_a_container_that_may_not_is_told_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_arguments: object) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(nodes, "_syscall", refused)
    with made([0, 1]) as arena:
        works(arena)
    (line,) = warnings(caplog)
    assert "it refused NUMA nodes 0, 1: Operation not permitted; give the container the capability SYS_NICE" in line


def test_a_processor_whose_call_is_not_known_is_not_guessed_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nodes, "_syscall", None)
    monkeypatch.setattr("platform.machine", lambda: "z80")
    with made([0]) as arena:
        works(arena)
    (line,) = warnings(caplog)
    assert line.endswith('Function not implemented; set [l1] numa = "off"')


def test_without_a_choice_nothing_is_asked_or_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nodes, "_syscall", None)
    with caplog.at_level(logging.DEBUG), made("off") as arena:
        works(arena)
    assert not [each for each in caplog.records if "has pages" not in each.getMessage()]


# the doctor


def told(numa: object, machine: Path) -> Finding:
    options = msgspec.convert({"numa": numa}, PinnedOptions)
    (found,) = (each for each in diagnose(options, machine) if each.id == "pinned.numa")
    return found


def test_the_doctor_says_what_the_arena_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = sysfs(tmp_path, "0-1", (GPU, 0))
    monkeypatch.setattr("kvf_pinned.advice.place", lambda *_: None)
    fact = "the arena lies on NUMA node 0, while there is room: these nodes have accelerators"
    assert told("auto", machine) == Finding("pinned.numa", "ok", fact)
    assert told([0, 1], machine).fact.startswith("the arena is interleaved over NUMA nodes 0, 1, while there is room")
    assert told("off", machine).fact == "the arena lies on nodes that the kernel chooses: numa is off"


@pytest.mark.usefixtures("permitted")
def test_the_doctor_tries_whether_it_can(tmp_path: Path) -> None:
    machine = sysfs(tmp_path, "0-1023", (GPU, 1023))
    assert told([0], machine).level == "ok"
    found = told("auto", machine)
    assert (found.level, found.fact) == ("warn", "the arena cannot be placed on NUMA node 1023: Invalid argument")
    assert "Mems_allowed_list" in found.advice


def by_id(found: Iterator[Finding]) -> dict[str, Finding]:
    return {each.id: each for each in found}


def test_numa_nodes_are_told_in_order(tmp_path: Path) -> None:
    machine = sysfs(tmp_path, "0,2,10", cpus={10: "10-11", 2: "2-3", 0: ""})
    found = by_id(numa_findings(machine))
    assert found["numa.nodes"].fact == "3: node0 has the CPUs none; node2 has the CPUs 2-3; node10 has the CPUs 10-11"
    assert found["numa.accelerators"].fact == "the PCI bus has no accelerators"
    assert by_id(numa_findings(tmp_path / "none")).keys() == {"numa.nodes"}


def test_the_node_of_the_accelerators_is_told(tmp_path: Path) -> None:
    cpus = {0: "0-7", 1: "8-15"}
    one = sysfs(tmp_path / "one", "0-1", (CONSOLE, 0), (GPU, 1), (NETWORK, 0), (CONSUMER_GPU, 1), cpus=cpus)
    found = by_id(numa_findings(one))["numa.accelerators"]
    assert found.fact == "0000:01:00.0, 0000:03:00.0 on node1"
    assert found.advice.endswith("numactl --cpunodebind=1 kvframework serve")
    several = sysfs(tmp_path / "several", "0-1", (GPU, 1), (OTHER_ACCELERATOR, 0), cpus=cpus)
    found = by_id(numa_findings(several))["numa.accelerators"]
    assert (found.fact, found.advice) == ("0000:01:00.0 on node0; 0000:00:00.0 on node1", "")
    unknown = sysfs(tmp_path / "unknown", "0-1", (GPU, -1), cpus=cpus)
    found = by_id(numa_findings(unknown))["numa.accelerators"]
    assert (found.fact, found.advice) == ("0000:00:00.0 on no known node", "")
