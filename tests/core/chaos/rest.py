"""Checks of a system at rest: nothing is held, nothing has grown, nothing is left behind. Each check raises
`AssertionError`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvframework.wire import messages as m
from tests.core.chaos.world import MARK, World
from tests.core.tiers.nodes import await_state
from tests.support.wire_client import WireClient

_L2_S = 60.0  # for writes to L2 and loads from it
_AT_ONCE_S = 10.0


def check_rest(world: World) -> None:
    """Check the server after the last engine has ended and the last fault is over."""
    with world.server.client() as client:
        for index in range(2 if world.plan.l2 else 0):
            await_state(client, "closed", index)
        _await_none(client, _under_way, _L2_S)
        _await_none(client, _held, _AT_ONCE_S)
        client.call("CLEAR", m.Clear())
        l1 = client.status()["l1"]
        assert l1["objects"] == l1["used_bytes"] == 0, f"CLEAR left {l1}"
        whole = l1["capacity_bytes"]
        assert l1["free_bytes"] == l1["largest_free_bytes"] == whole, f"the arena is not whole again: {l1}"


def check_end(world: World) -> None:
    status = world.server.stop()
    assert status == 0, f"the server ended with status {status}"
    folder, stays = world.server.log_file.parent, (world.server.log_file.name, "s.sock.hold.lock")
    left = sorted(path.name for path in folder.iterdir() if path.name not in stays)
    assert not left, f"the server leaves {left}"


def check_logs(world: World) -> None:
    for log in (world.server.log_file, *(engine.log for engine in world.engines)):
        text = log.read_text(errors="replace")
        at = text.find("Traceback (most recent call last)")
        assert at < 0, f"{log.name} has a traceback: {text[max(at - 500, 0) : at + 3000]}"


def check_nothing_left(mark: str) -> None:
    """Check after the end of all processes: no process of the run is left, and nothing in shared memory."""
    left = [pid for pid in _pids() if f"{MARK}={mark}".encode() in _environment(pid)]
    assert not left, f"processes of the run still run: {left}"
    shared = [path.name for path in Path("/dev/shm").glob("*kvf*")]
    assert not shared, f"shared memory is left: {shared}"


def _under_way(status: dict[str, Any]) -> dict[str, int]:
    writes = sum(each["write_pending"] for each in status["l2"])
    return {"writes to L2": writes, "loads from L2": status["prefetch"]["in_flight"]}


def _held(status: dict[str, Any]) -> dict[str, int]:
    """What clients other than the asking one hold."""
    found = {name: status["l1"][name] for name in ("pins", "pin_leases", "write_leases", "quarantined_bytes")}
    sessions = len(status["messaging"]["sessions"]) - 1
    return {**found, "tickets": status["tickets"], "instances": len(status["instances"]), "sessions": sessions}


def _await_none(client: WireClient, found: Callable[[dict[str, Any]], dict[str, int]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := {name: number for name, number in found(client.status()).items() if number}:
        assert time.monotonic() < deadline, f"after {seconds} s of rest there are still {left}"
        time.sleep(0.05)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
