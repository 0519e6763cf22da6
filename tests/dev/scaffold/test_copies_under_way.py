"""The queue of copies that `kvframework new transport NAME --async` writes, on the simulated accelerator."""

from __future__ import annotations

import array
import importlib
from pathlib import Path

import pytest

from kvf_dev.scaffold import PluginNames, render, write_distribution
from kvf_dev.testing.accelerator import DeviceTensor, SimulatedNode
from kvf_dev.testing.kit import wait_until
from kvframework.api.copy_plans import CopyBatch
from kvframework.api.futures import Future
from kvframework.api.transport import ArenaRange, StoreOutcome, StorePlan


def test_the_arena_is_given_back_once_no_copy_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the device would write to memory that it no longer knows."""
    write_distribution(tmp_path / "plugin", render(PluginNames("transport", "under_way", "async")))
    monkeypatch.syspath_prepend(tmp_path / "plugin")
    copies, device, runtime = (
        importlib.import_module(f"kvf_under_way.{name}") for name in ("copies", "device", "runtime")
    )
    with SimulatedNode(tmp_path / "node") as node:
        found = runtime.runtime(str(node.path))
        tensor = DeviceTensor.empty(found, found.devices[0], [256], "uint8")
        place, arena, done = ArenaRange(0, 0, 0, 256), bytearray(256), Future.resolved(StoreOutcome(stored=1))
        device.Pinned(found, device.Arena(memoryview(arena), 0))
        plan = StorePlan(memoryview(arena), [place], StoreOutcome(), commit=lambda: done, abort=lambda: None)
        one = array.array("Q", [0])
        batch = CopyBatch(array.array("Q", [tensor.address]), one, one, one, (), 256)
        held = device.Device(found, tensor)
        queue, returned = copies.CopyQueue(), []
        queue.when_idle(lambda: returned.append("idle"))
        node.inject("hold", held.name)
        copy = copies.Copy(held, held.mark(None), lambda _: [batch], StoreOutcome, tensor, to_arena=True)
        future = queue.begin(copy, Future.resolved(plan))
        wait_until(lambda: node.hits("hold"), "a copy that is held")
        queue.when_idle(lambda: returned.append("under way"))
        assert returned == ["idle"]
        node.release()
        wait_until(lambda: returned == ["idle", "under way"], "the end of the copy")
        assert future.result(5.0).stored == 1
        queue.close()
        held.close()


def test_the_rig_brings_its_device_back_after_a_failed_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the kit accuses the transport in all later tests of the class."""
    write_distribution(tmp_path / "plugin", render(PluginNames("transport", "brought_back", "async")))
    monkeypatch.syspath_prepend(tmp_path / "plugin")
    monkeypatch.syspath_prepend(tmp_path / "plugin" / "tests")
    with SimulatedNode(tmp_path / "node") as node:
        rig = importlib.import_module("brought_back_rig").make(str(node.path))
        with pytest.raises(AssertionError, match="of a test"), rig.without_device():
            raise AssertionError("of a test")
        tensor = rig.empty([4], "uint8")
        rig.write(tensor, b"back")
        assert rig.read(tensor) == b"back"
        rig.close()
