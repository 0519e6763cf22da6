"""Malformed messages of any number of frames, from anybody who can connect: others are served without a pause, what
came is counted, and the health probe asks the serving loop itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvframework.wire import messages as m
from kvframework.wire.frames import MAX_BUFFERS
from tests.core.survival import stranger_program
from tests.core.survival.faulty_plugin import begun
from tests.core.survival.faulty_server import answer, faulty_server, send
from tests.core.wire_path.remote import RemoteServer, remote_server
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

# Of one call of others, and of half of them, while the machine has much else to do: alone they take milliseconds.
PAUSE_S, USUAL_S = 10.0, 1.0
ROUNDS = 30
COUNTS = [*range(1, 41), 100, 1000, MAX_BUFFERS + 2, MAX_BUFFERS + 3, MAX_BUFFERS + 4, 3 * MAX_BUFFERS]


@pytest.fixture(scope="module")
def server() -> Iterator[RemoteServer]:
    with remote_server(curve=False) as running:
        yield running


def counters(client: WireClient) -> dict[str, int]:
    found: dict[str, int] = client.status()["messaging"]["counters"]
    return found


@pytest.mark.parametrize("where", ["local", "local, no HELLO", "remote", "remote, no HELLO"])
def test_every_number_of_frames_is_answered_and_counted(server: RemoteServer, where: str) -> None:
    endpoint = server.process.endpoint if where.startswith("local") else server.tcp
    hello = "no HELLO" not in where
    with server.local() as watcher, WireClient(endpoint, hello=hello, timeout=20.0) as stranger:
        before = counters(watcher)
        for count in COUNTS:
            request_id = (1000 + count).to_bytes(8, "little")
            stranger.socket.send_multipart([request_id, b"NOOP", b"\x80", *[b"x"] * count][:count])
            answered, kind, error = stranger.receive()
            assert answered == 1000 + count
            if count == 3 and hello:
                assert kind == "NOOP"
            elif count < 3 or hello:
                assert error.code == ("protocol.frames" if count - 3 <= MAX_BUFFERS else "protocol.too_large")
            elif count - 3 <= MAX_BUFFERS:
                assert error.code == "protocol.hello_required"
            else:
                assert error.code == "protocol.too_large"
        # Without a request id nobody can be answered: of these only the count remains.
        for count in COUNTS:
            stranger.socket.send_multipart([b"", b"NOOP", b"\x80", *[b"x"] * count][:count])
        stranger.send("NOOP", m.Empty())
        assert stranger.receive()[1] == ("NOOP" if hello else "ERROR"), "all before it has been taken in"

        after = counters(watcher)
        broken = sum(count < 3 or count - 3 > MAX_BUFFERS for count in COUNTS)
        assert after["unanswerable"] - before.get("unanswerable", 0) == len(COUNTS)
        assert after["malformed"] - before.get("malformed", 0) == len(COUNTS) + broken
        told = len(COUNTS) - 1 if hello else len(COUNTS) + 1
        assert after["errors"] - before.get("errors", 0) == told


def test_others_are_served_without_a_pause(server: RemoteServer) -> None:
    """A process sends junk as fast as it can; an engine stores, looks up and loads all the while."""
    with server.local() as watcher, WireClient(server.process.endpoint, timeout=PAUSE_S) as engine:
        watcher.call("CLEAR", m.Clear())
        registered = engine.register()
        command = [sys.executable, "-m", stranger_program.__name__, server.process.endpoint, server.tcp, "1"]
        stranger = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "ready\n"
            before = counters(watcher)
            waits = []
            for number in range(ROUNDS):
                key = key_for(registered, [number] * 512)
                engine.store(key, b"%04d" % number)
                began = time.monotonic()
                reply = engine.lookup(key)
                waits.append(time.monotonic() - began)
                assert reply.hit_tokens == 512
                found = engine.retrieve(key)
                assert found is not None
                assert found == b"%04d" % number * (len(found) // 4)
                engine.call("FREE_LOOKUP_LOCKS", m.TicketRef(reply.ticket))
            after = counters(watcher)
            sent = int(stranger.communicate("\n", timeout=60)[0])
        finally:
            stranger.kill()
            stranger.communicate()
        assert sorted(waits)[ROUNDS // 2] < USUAL_S
        assert sent > 100
        for name in ("malformed", "unanswerable", "errors.protocol.frames", "errors.protocol.hello_required"):
            assert after[name] - before.get(name, 0) > 10, name
        assert after.get("liveness_refused", 0) > 0
        assert after.get("loop_errors", 0) == 0
        assert "Traceback" not in server.process.log


def status_check(server: ServerProcess, timeout: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvframework.cli.main", "status", "--check", "--timeout", str(timeout)]
    return subprocess.run(
        [*command, "--endpoint", server.endpoint],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )


def test_the_health_probe_asks_the_serving_loop(tmp_path: Path) -> None:
    """The process lives, its sockets take connections, its other threads work; only its loop is stuck."""
    gate = tmp_path / "gate"
    with faulty_server(tmp_path) as server, server.client(timeout=60.0) as client:
        wedged = send(client, "WEDGES", str(gate))
        wait_until(begun(gate).exists, 20.0, "the wedge")
        began = time.monotonic()
        probe = status_check(server, 1.0)
        assert probe.returncode == 2, probe.stdout
        assert "run.server_gone" in probe.stderr
        assert time.monotonic() - began < 20
        assert server.process is not None
        assert server.process.poll() is None
        gate.touch()
        assert answer(client, wedged) == "done"
        healthy = status_check(server, 20.0)
        assert (healthy.returncode, healthy.stdout) == (0, "ok\n")
