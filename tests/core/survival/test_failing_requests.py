"""A request that nobody knows, a payload that cannot be decoded: the caller has a typed error in
milliseconds, others notice nothing, and nobody waits longer than for his own deadline. The health probe asks the
serving loop itself."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvframework import errors
from kvframework.client import KVClient, RequestHashes, SchedulerAdapter
from kvframework.wire import messages as m
from tests.core.survival.faulty_plugin import begun
from tests.core.survival.faulty_server import answer, faulty_server, send
from tests.support.processes import ran
from tests.support.server_process import ServerProcess, client_fixture
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

PATIENCE_S = 20.0
# Of the fastest of several calls: milliseconds on an idle machine. The deadlines of these requests are a minute.
AT_ONCE_S = 0.5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with faulty_server(tmp_path_factory.mktemp("site")) as process:
        yield process


client = client_fixture(timeout=PATIENCE_S)


def fastest(call: Callable[[], object], error: type[Exception]) -> float:
    """Seconds from the question to the typed answer, of the fastest of several."""
    times = []
    for _ in range(5):
        began = time.monotonic()
        with pytest.raises(error):
            call()
        times.append(time.monotonic() - began)
    return min(times)


def test_what_cannot_be_understood_is_a_typed_error_in_milliseconds(client: WireClient) -> None:
    registered = client.register()
    key = key_for(registered, [1] * 256)
    before = client.status()["messaging"]["counters"]
    for name, payload, error in (
        ("NO_SUCH_REQUEST", m.Empty(), errors.UnknownRequest),
        ("faulty.NO_SUCH", m.Empty(), errors.UnknownRequest),
        ("PREPARE_STORE", m.Empty(), errors.InvalidPayload),
        ("PREPARE_STORE", m.Lookup(key), errors.InvalidPayload),
        ("LOOKUP", m.LeaseRef("x"), errors.InvalidPayload),
    ):
        assert fastest(lambda name=name, payload=payload: client.call(name, payload), error) < AT_ONCE_S
    after = client.status()["messaging"]["counters"]
    for code, count in (("unknown_request", 10), ("payload", 15)):
        name = f"errors.protocol.{code}"
        assert after[name] - before.get(name, 0) == count


def test_no_caller_waits_longer_than_its_own_deadline(
    server: ServerProcess, client: WireClient, tmp_path: Path
) -> None:
    """The serving loop itself is wedged by a plugin: all of its callers give up, each at its own time, and go on once
    it serves again."""
    gate = tmp_path / "gate"
    registered = client.register()
    client.store(key_for(registered, [1] * 256), b"HERE")
    with KVClient(server.endpoint) as engine:
        assert engine.wait_up(PATIENCE_S)
        scheduler = SchedulerAdapter(engine, model_name="tiny", namespace=registered.namespace, chunk_tokens=256)
        request = RequestHashes(engine.hasher, 256, request_id="r")
        request.extend([1] * 256)
        wedged = send(client, "WEDGES", str(gate))
        wait_until(begun(gate).exists, PATIENCE_S, "the wedge")
        waits: dict[float, float] = {}

        def call(deadline: float) -> None:
            began = time.monotonic()
            with pytest.raises((errors.DeadlineExceeded, errors.ServerGone)):
                engine.request("REPORT_STATUS", m.Empty(), m.StatusReply, timeout=deadline)
            waits[deadline] = time.monotonic() - began

        threads = [threading.Thread(target=call, args=(0.1 * number,)) for number in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(waits) == 8
        assert all(waited < deadline + 2.0 for deadline, waited in waits.items()), waits
        assert scheduler.lookup(request).hit_tokens == 0, "a miss, not a wait"
        assert not engine.usable
        gate.touch()
        assert answer(client, wedged) == "done"
        wait_until(lambda: engine.usable, PATIENCE_S, "the client to heal")
        wait_until(lambda: scheduler.lookup(request).hit_tokens == 256, PATIENCE_S, "hits")


def status_check(server: ServerProcess, timeout: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvframework.cli.main", "status", "--check", "--timeout", str(timeout)]
    return ran(*command, "--endpoint", server.endpoint, code=None, env={**os.environ, "COLUMNS": "200"})


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
        assert server.process.poll() is None
        gate.touch()
        assert answer(client, wedged) == "done"
        healthy = status_check(server, 20.0)
        assert (healthy.returncode, healthy.stdout) == (0, "ok\n")
