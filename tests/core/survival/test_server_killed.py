"""The server is killed and started again, quickly or slowly, while engine processes store and load."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from kvframework.api.layout import MemoryLayoutDesc
from kvframework.wire import messages as m
from tests.core.survival.holdings import held
from tests.core.survival.survivor_program import KNOWN, MODEL, tokens_of
from tests.core.survival.survivors import Survivors
from tests.core.tiers.nodes import await_count
from tests.support.processes import arenas, children, descriptors
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for, register_tiny

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

NOTICED_S = 2.0
DEATHS = ["quickly", "slowly"]


@pytest.mark.parametrize(
    "deaths", [DEATHS, pytest.param(DEATHS * 30, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])], ids=len
)
def test_engines_outlive_every_death_of_their_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: list[str]
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    tier = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}", "l2.0.timeout_s=10")
    with ServerProcess(*tier, capacity="32MiB") as server:
        # Of the processes that are started from here on.
        monkeypatch.setenv("TMPDIR", str(temporary))
        endpoint_folder = server.log_file.parent
        with Survivors(server.endpoint, tmp_path, ["arena", "arena", "wire"]) as survivors:
            engines = survivors.engines
            with server.client() as watcher:
                namespace = await_known(watcher)
                boot = boot_of(watcher)
            for engine in engines:
                engine.await_event("worked", boot=boot)
            open_before = {engine.instance_id: descriptors(engine.process.pid) for engine in engines}
            fresh_server = None

            for death in deaths:
                killed = time.monotonic()
                server.kill9()
                if death == "slowly":
                    for engine in engines:
                        engine.await_event("missed", since=killed)
                server.start()
                with server.client() as watcher:
                    assert hits(watcher, namespace) == [len(prompt) * 256 for prompt in KNOWN], "L2 has them all"
                    boot = boot_of(watcher)
                    for engine in engines:
                        assert engine.await_event("gone", since=killed).at - killed < NOTICED_S
                        engine.await_event("up", boot=boot)
                        engine.await_event("worked", boot=boot)
                    status = watcher.status()
                    assert status["non_gpu_instance_ids"] == [engine.instance_id for engine in engines]
                for engine in engines:
                    pid, most = engine.process.pid, open_before[engine.instance_id]
                    wait_until(lambda pid=pid: arenas(pid) == 1, what="the end of the old arena")  # type: ignore[misc]
                    await_no_more(pid, most)
                    assert children(pid) == set()
                assert children(server.pid) == set()
                fresh_server = fresh_server or sorted(path.name for path in endpoint_folder.iterdir())
                assert sorted(path.name for path in endpoint_folder.iterdir()) == fresh_server

            reports = [engine.stop() for engine in engines]
            assert all(report.stored > len(KNOWN) and report.loaded > 0 for report in reports), reports
        with server.client() as watcher:
            wait_until(lambda: watcher.status()["non_gpu_instance_ids"] == [], what="the end of the engines")
            wait_until(lambda: held(watcher) == {}, what="what they held")
        assert server.stop() == 0
        assert [path.name for path in endpoint_folder.iterdir()] == [server.log_file.name]
        assert "Traceback" not in server.log
    assert list(temporary.iterdir()) == []
    assert not list((tmp_path / "l2").glob("??/.*.tmp")), "half-written values"


def test_what_is_in_flight_at_the_death_fails_at_once(tmp_path: Path) -> None:
    """Whatever an engine process has asked for and not been answered."""
    from kvframework.client import RequestHashes, SchedulerAdapter

    with ServerProcess("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}") as server:
        with server.client() as other:
            registered = other.register()
            other.store(key_for(registered, [7] * 1024), b"kept")
            await_count(other, "stored", 4)
            other.call("CLEAR", m.Clear())
        with server.engine_client() as client:
            scheduler = SchedulerAdapter(client, model_name="tiny", namespace=registered.namespace, chunk_tokens=256)
            request = RequestHashes(client.hasher, 256, request_id="r")
            request.extend([7] * 1024)
            assert scheduler.wait(scheduler.lookup(request), 10).hit_tokens == 1024
            instance = register_tiny(client, 2)
            server.sigstop()
            key = key_for(registered, [9] * 1024)
            transfer = instance.transfer(key)
            futures = [
                *(client._connection.begin("LOOKUP", m.Lookup(key), timeout=60) for _ in range(50)),
                *(client.store(transfer) for _ in range(50)),
                *(client.load(transfer, 0) for _ in range(50)),
                client._connection.begin("PREPARE_STORE", m.Prepare(key, 1), timeout=60),
            ]
            assert not any(future.query() for future in futures)
            killed = time.monotonic()
            server.kill9()
            wait_until(lambda: all(future.query() for future in futures), what="an end of every future")
            assert client.boot_id is None
            assert not client.store(transfer).result(0).ok, "no wait for a server that is known to be down"
            assert time.monotonic() - killed < 30


def await_known(client: WireClient) -> bytes:
    """Waits until L2 has what all engines have in common; the namespace."""
    (namespace,) = client.status()["namespaces"]
    found = bytes.fromhex(namespace)
    # The oldest are written first.
    await_count(client, "stored", sum(map(len, KNOWN)) + 1)
    return found


def hits(client: WireClient, namespace: bytes) -> list[int]:
    """What a LOOKUP of each known prompt ends with, from a client that has registered nothing."""
    replies = []
    registered = m.Registered(namespace, MemoryLayoutDesc(256, ()))
    for prompt in KNOWN:
        key = msgspec.structs.replace(key_for(registered, tokens_of(prompt)), model_name=MODEL)
        replies.append(client.hit(key))
    return replies


def await_no_more(pid: int, before: dict[int, str]) -> None:
    """The process has no more descriptors open than before."""
    with contextlib.suppress(AssertionError):
        wait_until(lambda: len(descriptors(pid)) <= len(before))
    now = descriptors(pid)
    assert len(now) <= len(before), f"opened: {now.items() - before.items()}, closed: {before.items() - now.items()}"


def boot_of(client: WireClient) -> str:
    return str(client.status()["server"]["boot_id"])
