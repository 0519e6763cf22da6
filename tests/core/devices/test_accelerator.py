"""The simulated accelerator does what a device does, and refuses and notes what a device would hide."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvf_dev.testing.accelerator import (
    Accelerator,
    AcceleratorError,
    Misuse,
    SimulatedNode,
)
from tests.support.waiting import wait_until

DATA = bytes(range(256))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SimulatedNode]:
    with SimulatedNode(tmp_path, nbytes=1 << 20, max_delay_s=0.0005) as made:
        yield made


@pytest.fixture
def runtime(node: SimulatedNode) -> Iterator[Accelerator]:
    made = Accelerator(node.path)
    yield made
    made.close()


@pytest.fixture
def device(node: SimulatedNode) -> str:
    return node.devices[0]


class Peer:
    """Another process on the node."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.core.devices.peer_program", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, method: str, *arguments: Any, keep: str = "_") -> Any:
        plain = ["hex:" + each.hex() if isinstance(each, bytes) else each for each in arguments]
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([keep, method, *plain]) + "\n")
        self.process.stdin.flush()
        verdict, result = json.loads(self.process.stdout.readline())
        if verdict == "error":
            raise AcceleratorError(result)
        return result

    def end(self, *, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture
def peer(node: SimulatedNode) -> Iterator[Peer]:
    made = Peer(node.path)
    yield made
    made.end()


def kinds(node: SimulatedNode) -> list[str]:
    return [violation.kind for violation in node.violations()]


def host() -> memoryview:
    return memoryview(bytearray(4096))


# memory


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


# streams and events


def test_a_read_before_its_event_is_caught(runtime: Accelerator, node: SimulatedNode, device: str) -> None:
    stream, other = runtime.stream(device), runtime.stream(device)
    address = runtime.allocate(device, 256)
    runtime.pin(0, 4096)
    stream.hold()
    runtime.write(address, DATA, stream)
    runtime.copy(other, host(), [address + 200], [0], 8, to_host=True)
    with pytest.raises(AcceleratorError, match="unordered: a copy from the device runs before a write"):
        other.synchronize()
    stream.release()
    stream.synchronize()
    assert kinds(node) == ["unordered"]


def test_a_write_over_what_is_still_read_is_caught(runtime: Accelerator, node: SimulatedNode, device: str) -> None:
    copies = runtime.stream(device)
    address = runtime.allocate(device, 256)
    runtime.pin(0, 4096)
    copies.hold()
    runtime.copy(copies, host(), [address], [0], 128, to_host=True)
    runtime.write(address + 128, DATA[:128])  # other bytes
    with pytest.raises(AcceleratorError, match="unordered: a write by a kernel runs before a copy"):
        runtime.write(address + 127, b"x")
    copies.release()
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


def test_work_on_the_wrong_device_is_caught(runtime: Accelerator, node: SimulatedNode) -> None:
    here, there = node.devices
    address = runtime.allocate(here, 256)
    runtime.pin(0, 4096)
    with pytest.raises(Misuse, match="wrong_device"):
        runtime.copy(runtime.stream(there), host(), [address], [0], 8, to_host=True)
    with pytest.raises(Misuse, match="wrong_device"):
        runtime.wait(runtime.stream(there), runtime.create_event(here))
    with pytest.raises(Misuse, match="not_pinned"):
        runtime.copy(runtime.stream(here), host(), [address], [4090], 8, to_host=True)
    assert kinds(node) == ["wrong_device", "wrong_device", "not_pinned"]


# faults


# other processes


def test_memory_and_events_are_shared_by_handle(
    runtime: Accelerator, peer: Peer, node: SimulatedNode, device: str
) -> None:
    address = runtime.allocate(device, 512)
    stream = runtime.stream(device)
    event = runtime.create_event(device, interprocess=True)
    stream.hold()
    runtime.write(address + 16, DATA, stream)
    runtime.record(event, stream)
    there = peer("open_memory", device, runtime.export_memory(address + 16)[1], keep="memory")
    peer("open_event", device, runtime.export_event(event), keep="event")
    peer("stream", device, keep="stream")
    peer("pin", 0, 4096)
    assert peer("reached", "$event") is False
    peer("wait", "$stream", "$event")
    peer("copy", "$stream", [there + 16], [8], 256, True)
    assert node.mappings() == 1
    stream.release()
    peer("synchronize", "$stream")
    assert bytes.fromhex(peer("host", 8, 256)) == DATA
    assert peer("reached", "$event") is True
    peer("close_memory", there)
    with pytest.raises(AcceleratorError, match="use_after_close"):
        peer("copy", "$stream", [there], [0], 8, True)
    assert (node.mappings(), kinds(node)) == (0, ["use_after_close"])


def test_handles_work_where_they_are_meant_to(
    runtime: Accelerator, peer: Peer, node: SimulatedNode, device: str
) -> None:
    address = runtime.allocate(device, 512)
    handle = runtime.export_memory(address)[1]
    event = runtime.create_event(device, interprocess=True)
    with pytest.raises(Misuse, match="cannot open its own handle"):
        runtime.open_memory(device, handle)
    with pytest.raises(AcceleratorError, match="open: memory of"):
        peer("open_memory", node.devices[1], handle)
    with pytest.raises(AcceleratorError, match="wrong_device"):
        peer("open_event", node.devices[1], runtime.export_event(event))
    with pytest.raises(AcceleratorError, match="no handle of this kind"):
        peer("open_memory", device, runtime.export_event(event))
    with pytest.raises(AcceleratorError, match="no such allocation"):
        peer("open_memory", device, handle[:-1] + bytes([handle[-1] ^ 1]))
    with pytest.raises(AcceleratorError, match="wrong_process"):
        peer("read", address, 8)
    runtime.free(address)
    with pytest.raises(AcceleratorError, match="was freed"):
        peer("open_memory", device, handle)


def test_memory_freed_under_another_process_is_caught(
    runtime: Accelerator, peer: Peer, node: SimulatedNode, device: str
) -> None:
    address = runtime.allocate(device, 512)
    there = peer("open_memory", device, runtime.export_memory(address)[1])
    peer("stream", device, keep="stream")
    peer("pin", 0, 4096)
    runtime.free(address)
    peer("copy", "$stream", [there], [0], 8, True)
    with pytest.raises(AcceleratorError, match="use_after_free"):
        peer("synchronize", "$stream")
    assert kinds(node) == ["use_after_free"]


def test_a_dead_process_leaves_its_memory_to_those_that_hold_it(
    runtime: Accelerator, node: SimulatedNode, device: str
) -> None:
    doomed = Peer(node.path)
    address = doomed("allocate", device, 1 << 19)
    doomed("export_memory", address, keep="lent")
    handle = eval_handle(doomed, address)
    mine = runtime.open_memory(device, handle)
    doomed.end(kill=True)
    wait_until(lambda: kinds(node) == ["leaked_context"])
    runtime.allocate(device, 512)
    with pytest.raises(AcceleratorError, match="out of memory"):
        runtime.allocate(device, 1 << 19)
    runtime.close_memory(mine)
    assert kinds(node) == []
    runtime.allocate(device, 1 << 19)


def eval_handle(peer: Peer, address: int) -> bytes:
    """The handle out of the tuple that the peer shows."""
    import ast

    shown: bytes = ast.literal_eval(peer("export_memory", address))[1]
    return shown


def test_without_a_node_there_is_no_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVF_SIMULATED_NODE", raising=False)
    for path in (None, tmp_path / "nowhere"):
        with pytest.raises(AcceleratorError, match="no simulated node"):
            Accelerator(path)
