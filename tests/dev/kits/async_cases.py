"""The transport that `kvframework new transport NAME --async` writes, with one fault each, a line of `BUGS`, under its
kit. Run by pytest outside of the repository; all must fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvf_dev.scaffold import PluginNames, render, write_distribution
from kvf_dev.testing import TransportConformance
from kvf_dev.testing.accelerator import Event, SimulatedNode
from kvf_dev.testing.transport import RigSpec, TransportRig

PROJECT = Path(__file__).parent / "planted"
if not PROJECT.exists():
    write_distribution(PROJECT, render(PluginNames("transport", "planted", "async")))
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]

from kvf_planted import context, copies, device  # type: ignore[import-not-found]  # noqa: E402  written just now
from planted_rig import PlantedRig  # type: ignore[import-not-found]  # noqa: E402

KEPT: list[object] = []
Device, Context, Queue, Copy = device.Device, context.PlantedContext, copies.CopyQueue, copies.Copy


def make(node: str) -> TransportRig:
    rig: TransportRig = PlantedRig(node)
    rig.plugins = ("kvf_planted",)
    return rig


def no_current_stream(self: Any, event: Any, right: Any = Device.mark) -> Any:
    return self._recorded(self._runtime.stream(self.name)) if event is None else right(self, event)


def one_stream(self: Any, runtime: Any, address: Any, right: Any = Device.__init__) -> None:
    right(self, runtime, address)
    self.streams[True] = self.streams[False]


def many_streams(self: Any, host: Any, batch: Any, *, to_arena: bool, right: Any = Device.copy) -> None:
    right(self, host, batch, to_arena=to_arena)
    self.streams[to_arena] = self._runtime.stream(self.name)


def given_up(self: Any, event: Any, right: Any = Device.mark) -> Any:
    try:
        assert not getattr(self, "lost", False)
        return right(self, event)
    except Exception:
        self.lost = True
        raise


# By bug: what is patched.
BUGS: dict[str, tuple[Any, str, Any]] = {
    "IgnoresTheCurrentStream": (Device, "mark", no_current_stream),
    "TakesAnythingForNone": (
        Device,
        "mark",
        lambda self, event, right=Device.mark: right(self, event if isinstance(event, Event) else None),
    ),
    "KeepsTensors": (
        Context,
        "_memory",
        lambda self, to, right=Context._memory: KEPT.append([*to.kv_caches.values()]) or right(self, to),
    ),
    "KeepsPlans": (Copy, "_begin", lambda self, plan, right=Copy._begin: KEPT.append(plan) or right(self, plan)),
    "KeepsTheArena": (Context, "on_arena", lambda self, to, right=Context.on_arena: KEPT.append(to) or right(self, to)),
    "RegistersAnywhere": (Context, "on_registered", lambda self, *both: setattr(self, "_registered", both)),
    "HasOneStream": (Device, "__init__", one_stream),
    "WaitsForTheLastStreamOnly": (Device, "copy", many_streams),
    "ClosesAtOnce": (Queue, "close", lambda self: vars(self).update(_closed=True, _thread=None) or self._wake()),
    "GivesUpAfterAReset": (Device, "mark", given_up),
}


def _tests_of(owner: Any, name: str, work: Any) -> type:
    class Planted(TransportConformance):
        @pytest.fixture(scope="class")
        @classmethod
        def spec(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RigSpec]:
            with SimulatedNode(tmp_path_factory.mktemp("node")) as node, pytest.MonkeyPatch.context() as patch:
                patch.setattr(owner, name, work)
                yield RigSpec("async_cases:make", {"node": str(node.path)})

    return Planted


for _bug, _patch in BUGS.items():
    globals()[f"Test{_bug}"] = _tests_of(*_patch)
