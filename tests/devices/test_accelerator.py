"""The simulated accelerator does what a device does, and refuses and notes what a device would hide."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvf_dev.testing.accelerator import Accelerator, AcceleratorError, Misuse, SimulatedNode
from tests.support.waiting import wait_until

DATA = bytes(range(256))
DOOMED = """
import sys
from kvf_dev.testing.accelerator import Accelerator
runtime = Accelerator(sys.argv[1])
print(runtime.export_memory(runtime.allocate(sys.argv[2], 1 << 19))[1].hex(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SimulatedNode]:
    with SimulatedNode(tmp_path, nbytes=1 << 20, max_delay_s=0.0005) as made:
        yield made


@pytest.fixture
def runtime(node: SimulatedNode) -> Accelerator:
    made = Accelerator(node.path)
    made.pin(0, 4096)
    return made


@pytest.fixture
def peer(node: SimulatedNode) -> Accelerator:
    """A second one is another process to the node."""
    made = Accelerator(node.path)
    made.pin(0, 4096)
    return made


@pytest.fixture
def device(node: SimulatedNode) -> str:
    return node.devices[0]


@pytest.fixture
def host() -> memoryview:
    return memoryview(bytearray(4096))


def kinds(node: SimulatedNode) -> list[str]:
    return [violation.kind for violation in node.violations()]


def test_memory_that_is_gone_is_refused(runtime: Accelerator, node: SimulatedNode, device: str) -> None:
    address = runtime.allocate(device, 1024)
    runtime.free(address)
    with pytest.raises(Misuse, match="was freed"):
        runtime.read(address, 1)
    other = runtime.allocate(device, 1024)
    assert other != address
    assert runtime.read(other, 16) == b"\xdd" * 16, "freed memory holds poison"
    with pytest.raises(Misuse, match="out_of_bounds"):
        runtime.read(other + 1020, 8)
    with pytest.raises(Misuse, match="wrong_process"):
        runtime.read(0x1234, 8)
    assert kinds(node) == ["use_after_free", "out_of_bounds", "wrong_process"]


def test_a_read_before_its_event_is_caught(
    runtime: Accelerator, node: SimulatedNode, device: str, host: memoryview
) -> None:
    stream, other = runtime.stream(device), runtime.stream(device)
    address = runtime.allocate(device, 256)
    event = runtime.create_event(device)
    node.inject("hold", device)
    runtime.copy(stream, host, [address], [0], 256, to_host=False)
    runtime.copy(other, host, [address + 200], [0], 8, to_host=True)
    with pytest.raises(AcceleratorError, match="unordered: a copy from the device runs before a copy to the device"):
        other.synchronize()
    runtime.record(event, stream)
    runtime.wait(other, event)
    runtime.copy(other, host, [address + 200], [0], 8, to_host=True)
    node.release()
    other.synchronize()
    assert kinds(node) == ["unordered"]


def test_a_write_over_what_is_still_read_is_caught(
    runtime: Accelerator, node: SimulatedNode, device: str, host: memoryview
) -> None:
    copies = runtime.stream(device)
    address = runtime.allocate(device, 256)
    node.inject("hold", device)
    runtime.copy(copies, host, [address], [0], 128, to_host=True)
    runtime.write(address + 128, DATA[:128])  # other bytes
    with pytest.raises(AcceleratorError, match="unordered: a write by a kernel runs before a copy"):
        runtime.write(address + 127, b"x")
    node.release()
    copies.synchronize()
    assert kinds(node) == ["unordered"]


def test_an_event_that_was_never_recorded_is_caught(runtime: Accelerator, node: SimulatedNode, device: str) -> None:
    event = runtime.create_event(device, interprocess=True)
    with pytest.raises(Misuse, match="never_recorded"):
        runtime.reached(event)
    with pytest.raises(Misuse, match="never_recorded"):
        runtime.wait(runtime.stream(device), event)
    runtime.destroy_event(event)
    with pytest.raises(Misuse, match="use_after_close"):
        runtime.record(event, runtime.stream(device))
    assert kinds(node) == ["never_recorded", "never_recorded", "use_after_close"]


def test_work_on_the_wrong_device_is_caught(runtime: Accelerator, node: SimulatedNode, host: memoryview) -> None:
    here, there = node.devices
    address = runtime.allocate(here, 256)
    with pytest.raises(Misuse, match="wrong_device"):
        runtime.copy(runtime.stream(there), host, [address], [0], 8, to_host=True)
    with pytest.raises(Misuse, match="wrong_device"):
        runtime.wait(runtime.stream(there), runtime.create_event(here))
    with pytest.raises(Misuse, match="not_pinned"):
        runtime.copy(runtime.stream(here), host, [address], [4090], 8, to_host=True)
    assert kinds(node) == ["wrong_device", "wrong_device", "not_pinned"]


def test_memory_and_events_are_shared_by_handle(
    runtime: Accelerator, peer: Accelerator, node: SimulatedNode, device: str, host: memoryview
) -> None:
    address, stream = runtime.allocate(device, 512), runtime.stream(device)
    event = runtime.create_event(device, interprocess=True)
    release = stream.hold()
    runtime.write(address + 16, DATA, stream)
    runtime.record(event, stream)
    there = peer.open_memory(device, runtime.export_memory(address + 16)[1])
    opened, copies = peer.open_event(device, runtime.export_event(event)), peer.stream(device)
    peer.wait(copies, opened)
    assert not peer.reached(opened)
    release()
    copies.synchronize()
    peer.copy(copies, host, [there + 16], [8], 256, to_host=True)
    copies.synchronize()
    assert (node.mappings(), node.events(), node.streams()) == (1, 2, 2)
    assert host[8:264] == DATA
    assert peer.reached(opened)
    peer.close_memory(there)
    peer.destroy_event(opened)
    with pytest.raises(AcceleratorError, match="use_after_close"):
        peer.copy(copies, host, [there], [0], 8, to_host=True)
    assert (node.mappings(), node.events(), kinds(node)) == (0, 1, ["use_after_close"])


def test_handles_work_where_they_are_meant_to(
    runtime: Accelerator, peer: Accelerator, node: SimulatedNode, device: str
) -> None:
    address = runtime.allocate(device, 512)
    handle = runtime.export_memory(address)[1]
    event = runtime.export_event(runtime.create_event(device, interprocess=True))
    with pytest.raises(Misuse, match="cannot open its own handle"):
        runtime.open_memory(device, handle)
    with pytest.raises(AcceleratorError, match="open: the memory is on"):
        peer.open_memory(node.devices[1], handle)
    with pytest.raises(Misuse, match="wrong_device"):
        peer.open_event(node.devices[1], event)
    for false in (event, handle[:-1] + bytes([handle[-1] ^ 1])):
        with pytest.raises(AcceleratorError, match="names no allocation"):
            peer.open_memory(device, false)
    with pytest.raises(Misuse, match="wrong_process"):
        peer.read(address, 8)
    runtime.free(address)
    with pytest.raises(AcceleratorError, match="was freed"):
        peer.open_memory(device, handle)


def test_memory_freed_under_another_process_is_caught(
    runtime: Accelerator, peer: Accelerator, node: SimulatedNode, device: str, host: memoryview
) -> None:
    address = runtime.allocate(device, 512)
    there, stream = peer.open_memory(device, runtime.export_memory(address)[1]), peer.stream(device)
    runtime.free(address)
    peer.copy(stream, host, [there], [0], 8, to_host=True)
    with pytest.raises(AcceleratorError, match="use_after_free"):
        stream.synchronize()
    assert kinds(node) == ["use_after_free"]


def test_a_dead_process_leaves_its_memory_to_those_that_hold_it(
    runtime: Accelerator, node: SimulatedNode, device: str
) -> None:
    command = [sys.executable, "-c", DOOMED, str(node.path), device]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as doomed:
        mine = runtime.open_memory(device, bytes.fromhex(doomed.stdout.readline()))
        doomed.kill()
    wait_until(lambda: kinds(node) == ["leaked_context"])
    runtime.allocate(device, 512)
    with pytest.raises(AcceleratorError, match="out of memory"):
        runtime.allocate(device, 1 << 19)
    runtime.close_memory(mine)
    assert kinds(node) == []
    runtime.allocate(device, 1 << 19)


def test_without_a_node_there_is_no_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVF_SIMULATED_NODE", raising=False)
    for path in (None, tmp_path / "nowhere"):
        with pytest.raises(AcceleratorError, match="no simulated node"):
            Accelerator(path)
