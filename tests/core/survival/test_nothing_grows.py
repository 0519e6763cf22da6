"""Thousands of registrations, sessions, forks and requests that were given up later: memory, descriptors, threads and
arena ranges are what they were, in the client's process, in the server's and in its copier's.

By default some dozens of each, and Python's objects are counted; `-m slow` makes it 10,000, where bytes tell as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvf_dev.testing.accelerator import SimulatedNode
from kvf_dev.testing.transport import RigSpec
from kvf_dev.testing.transport.node import Program, endpoint_in
from kvframework.wire import messages as m
from tests.core.survival import traced_server
from tests.core.survival.holdings import held
from tests.core.survival.traced import FOLDER_VARIABLE, Traced, traced_of
from tests.support.line_process import LineProcess
from tests.support.processes import children, descriptors, own_bytes, threads
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient

FEW = {"sessions": 240, "registrations": 60, "forks": 240, "aborted": 120, "copies": 240}
MANY = 10_000
# The first half warms up, what follows is looked at so often.
LOOKS = 6
# Bytes a turn. The first hundreds of turns fill caches of the interpreter and of torch that have a bound: the names in
# the cache of attributes alone came to 100 KB by turn 500 of `sessions`, and from there on nothing was added.
TRACED_LIMIT = {"few": 2048, "many": 16}
# Objects a turn: whatever is kept of every turn has parts, which a cache of names has not.
OBJECTS_LIMIT = {"few": 0.8, "many": 0.02}
RESIDENT_LIMIT = {"few": 16384, "many": 128}


@dataclass(frozen=True)
class Look:
    """At one process. `traced` is zeros if nobody counts."""

    traced: Traced
    resident: int
    descriptors: int
    threads: int


class Turns(LineProcess):
    """The client's process."""

    def __init__(self, kind: str, endpoint: str, rig: str) -> None:
        super().__init__("-W", "ignore", "-m", "tests.core.survival.turns_program", kind, endpoint, rig)
        assert self.hear() == "ready"

    def go_on(self, turns: int) -> Traced:
        """Does so many more; what its objects take then."""
        return Traced(**json.loads(self.ask(str(turns))))


class TracedServerProgram(Program):
    module = traced_server.__name__


@contextmanager
def server_for(kind: str, directory: Path) -> Iterator[tuple[int, str, str]]:
    """Its process, its endpoint, and the rig that a client needs."""
    if kind != "copies":
        tier = ("l2.0.use=filesystem", f"l2.0.path={directory / 'l2'}", "l2.0.timeout_s=20")
        with ServerProcess(*tier, capacity="8MiB", program=("-m", traced_server.__name__)) as server:
            yield server.pid, server.endpoint, ""
            server.kill9()  # traced as it is, its orderly end takes long
        return
    folder = directory / "s"
    folder.mkdir(mode=0o700)
    devices = directory / "node"
    devices.mkdir()
    with SimulatedNode(devices, max_delay_s=0.0005) as node:
        spec = RigSpec("tests.devices.rigs:simdev", {"node": str(node.path)})
        server_program = TracedServerProgram("server", spec, endpoint_in(folder))
        try:
            rig = json.dumps([spec.factory, dict(spec.arguments)])
            yield server_program.process.pid, endpoint_in(folder), rig
        finally:
            server_program.kill()


@pytest.mark.parametrize(
    "size",
    [
        pytest.param("few", marks=pytest.mark.timeout(900)),
        pytest.param("many", marks=[pytest.mark.slow, pytest.mark.timeout(7200)]),
    ],
)
@pytest.mark.parametrize("kind", [*FEW])
def test_nothing_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, size: str) -> None:
    if kind == "registrations":
        pytest.importorskip("torch")
    turns = FEW[kind] if size == "few" else MANY
    traces = tmp_path / "traces"
    traces.mkdir()
    monkeypatch.setenv(FOLDER_VARIABLE, str(traces))
    with ExitStack() as stack:
        pid, endpoint, rig = stack.enter_context(server_for(kind, tmp_path))
        client = stack.enter_context(Turns(kind, endpoint, rig))
        watcher = stack.enter_context(WireClient(endpoint, timeout=20))
        client.go_on(turns // 2)
        # What grows does so every time; what was under way at one look on a busy machine does not.
        for _ in range(3 if size == "few" else 1):
            looks: dict[str, list[Look]] = {}
            ranges = []
            for _ in range(LOOKS + 1):
                traced = client.go_on(turns // 2 // LOOKS)
                ranges.append(at_rest(watcher))
                looks.setdefault("client", []).append(look_at(client.process.pid, traced))
                looks.setdefault("server", []).append(look_at(pid, traced_of(pid)))
                for number, copier in enumerate(sorted(children(pid))):
                    looks.setdefault(f"copier {number}", []).append(look_at(copier, Traced(0, 0)))
            told = {who: report(seen, turns // 2 // LOOKS) for who, seen in looks.items()}
            print(f"{kind}, {turns} turns:", json.dumps(told, indent=1))
            if all(
                each["objects_a_turn"] < OBJECTS_LIMIT[size] and each["resident_bytes_a_turn"] < RESIDENT_LIMIT[size]
                for each in told.values()
            ):
                break
        assert len({tuple(sorted(each.items())) for each in ranges}) == 1, f"arena ranges: {ranges}"
        for who, seen in looks.items():
            assert len(seen) == LOOKS + 1, f"{who} was restarted"
            assert max(each.descriptors for each in seen[1:]) <= seen[0].descriptors + 1, (who, told)
            assert max(each.threads for each in seen[1:]) <= seen[0].threads + 1, (who, told)
            assert told[who]["objects_a_turn"] < OBJECTS_LIMIT[size], (who, told)
            assert told[who]["traced_bytes_a_turn"] < TRACED_LIMIT[size], (who, told)
            assert told[who]["resident_bytes_a_turn"] < RESIDENT_LIMIT[size], (who, told)


def look_at(pid: int, traced: Traced) -> Look:
    return Look(traced, own_bytes(pid), len(descriptors(pid)), threads(pid))


def at_rest(watcher: WireClient) -> dict[str, Any]:
    """What the server says of the arena once nobody holds anything and it is empty."""

    def rests() -> bool:
        watcher.call("CLEAR", m.Clear())
        status = watcher.status()
        # An instance that stays keeps nothing of the arena.
        return held(watcher) == {} and status["prefetch"]["in_flight"] == 0 and status["l1"]["objects"] == 0

    wait_until(rests, what="rest")
    l1 = watcher.status()["l1"]
    names = ("used_bytes", "free_bytes", "largest_free_bytes", "quarantined_bytes", "objects")
    return {name: l1[name] for name in names}


def report(looks: list[Look], turns: int) -> dict[str, float]:
    return {
        "traced_bytes_a_turn": round(slope([each.traced.nbytes for each in looks]) / turns, 1),
        "objects_a_turn": round(slope([each.traced.objects for each in looks]) / turns, 2),
        "resident_bytes_a_turn": round(slope([each.resident for each in looks]) / turns, 1),
        "resident_mib": round(looks[-1].resident / (1 << 20), 1),
        "descriptors": looks[-1].descriptors,
        "threads": looks[-1].threads,
    }


def slope(values: list[int]) -> float:
    """The growth from one value to the next, by Theil and Sen: a single jump counts for nothing."""
    pairs = [
        (values[later] - values[earlier]) / (later - earlier)
        for earlier in range(len(values))
        for later in range(earlier + 1, len(values))
    ]
    return sorted(pairs)[len(pairs) // 2]
