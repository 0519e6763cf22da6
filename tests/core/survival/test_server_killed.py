"""The server is killed and started again, quickly or slowly, while engines store and load."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
import traceback
from pathlib import Path

import pytest

from kvframework.api.layout import MemoryLayoutDesc
from kvframework.client import KVClient
from kvframework.wire import messages as m
from tests.core.survival.holdings import held
from tests.core.tiers.nodes import await_count
from tests.support.engines import CHUNK, PagedEngine
from tests.support.lazy import torch
from tests.support.processes import arenas, children, descriptors
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for, register_tiny

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

NOTICED_S = 2.0
# No call may take longer. What is waited for at the most is the wire's patience with bulk data.
PATIENCE_S = 15.0
DEATHS = ["quickly", "slowly"]
MISSES = 20
KNOWN, CHUNKS = 8, 2  # the prompts that an engine begins with, and their chunks
HERE, THERE = list(range(32)), list(range(32, 64))


class Watched(KVClient):
    """`gone_at` is when it saw the end of its last server."""

    gone_at = 0.0

    def _down(self) -> None:
        self.gone_at = time.monotonic()
        super()._down()


class Engine(threading.Thread):
    """It looks prompts up, loads the hits, computes and stores, and compares every byte, until it is stopped. `worked`
    has the servers from which it has loaded, and at which it has stored; `hits` and `turns` count the known prompts."""

    def __init__(self, endpoint: str, number: int, path: str) -> None:
        super().__init__()
        # The machine that runs tests is slower than an engine allows its cache to be.
        self.client = Watched(endpoint, deadline_scale=20.0)
        assert self.client.wait_up(20)
        self.engine = PagedEngine(self.client, number, path=path)
        self.known = [1000 * number + prompt for prompt in range(KNOWN)]
        self.worked: set[bytes] = set()
        self.misses = self.hits = self.turns = 0
        self.broken = ""
        self._over = threading.Event()
        self._chance = random.Random(number)

    def run(self) -> None:
        try:
            for token in self.known:
                self._turn(token)
            fresh = itertools.count(1_000_000 * self.known[0])
            while not self._over.wait(0.005):
                self._turn(self._chance.choice([*self.known, *itertools.islice(fresh, KNOWN)]))
        except BaseException:  # noqa: BLE001  the test shows it
            self.broken = traceback.format_exc()

    def stop(self) -> None:
        self._over.set()
        self.join(60)
        assert not self.broken, self.broken
        self.client.close()

    def _turn(self, token: int) -> None:
        engine, boot, began = self.engine, self.client.boot_id, time.monotonic()
        request = engine.request([token] * CHUNKS * CHUNK, str(token))
        generator = torch.Generator().manual_seed(token)
        content = {name: torch.randn(kv[:, HERE].shape, generator=generator) for name, kv in engine.kv.items()}
        for name, kv in engine.kv.items():
            kv[:, HERE], kv[:, THERE] = content[name], -1
        found = engine.scheduler.wait(engine.scheduler.lookup(request), 2.0)
        loaded = found.hit_tokens == CHUNKS * CHUNK and engine.retrieve(request, THERE)
        assert not loaded or all(torch.equal(kv[:, THERE], content[name]) for name, kv in engine.kv.items()), "BYTES"
        stored = engine.store(request, HERE)
        engine.scheduler.free(found)
        assert str(token) in engine.worker.get_finished()[0], "a store is still under way"
        engine.worker.take_failed_blocks()
        assert time.monotonic() - began < PATIENCE_S
        self.turns += token in self.known
        self.hits += bool(loaded and token in self.known)
        self.misses += not loaded and boot is None
        if loaded and stored and boot is not None and boot == self.client.boot_id:
            self.worked.add(boot)


@pytest.mark.parametrize(
    "deaths", [DEATHS, pytest.param(DEATHS * 30, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])], ids=len
)
def test_engines_outlive_every_death_of_their_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: list[str]
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    tier = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}", "l2.0.timeout_s=10")
    with ServerProcess(*tier, capacity="32MiB") as server, contextlib.ExitStack() as stack:
        # Of the servers that are started from here on.
        monkeypatch.setenv("TMPDIR", str(temporary))
        endpoint_folder = server.log_file.parent
        engines = [Engine(server.endpoint, number, path) for number, path in enumerate(["arena", "arena", "wire"], 1)]
        for engine in engines:
            stack.callback(engine.stop)
            engine.start()
        namespace = engines[0].engine.registration.namespace
        with server.client() as watcher:
            # The oldest are written first.
            await_count(watcher, "stored", len(engines) * KNOWN * CHUNKS + 1)
        await_work(engines, boot_of(server))
        open_before, mapped, fresh_server = len(descriptors(os.getpid())), arenas(os.getpid()), None

        for death in deaths:
            killed, misses = time.monotonic(), [engine.misses for engine in engines]
            server.kill9()
            if death == "slowly":
                for engine, before in zip(engines, misses, strict=True):
                    wait_until(lambda engine=engine, before=before: engine.misses >= before + MISSES, what="misses")
            server.start()
            with server.client() as watcher:
                for token in (token for engine in engines for token in engine.known):
                    assert hit(watcher, namespace, token) == CHUNKS * CHUNK, "L2 has them all"
            await_work(engines, boot_of(server))
            assert all(0 < engine.client.gone_at - killed < NOTICED_S for engine in engines)
            assert server.status()["non_gpu_instance_ids"] == [1, 2, 3]
            wait_until(lambda: arenas(os.getpid()) <= mapped, what="the end of the old arena")
            wait_until(lambda: len(descriptors(os.getpid())) <= open_before, what="the end of what was open")
            assert children(server.pid) == set()
            fresh_server = fresh_server or sorted(path.name for path in endpoint_folder.iterdir())
            assert sorted(path.name for path in endpoint_folder.iterdir()) == fresh_server

        for engine in engines:
            engine.stop()
        with server.client() as watcher:
            wait_until(lambda: watcher.status()["non_gpu_instance_ids"] == [], what="the end of the engines")
            wait_until(lambda: held(watcher) == {}, what="what they held")
        assert server.stop() == 0
        assert [path.name for path in endpoint_folder.iterdir()] == [server.log_file.name]
        assert "Traceback" not in server.log
    assert list(temporary.iterdir()) == []
    assert not list((tmp_path / "l2").glob("??/.*.tmp")), "half-written values"


def await_work(engines: list[Engine], boot: str) -> None:
    def done() -> bool:
        assert not any(engine.broken for engine in engines), [engine.broken for engine in engines]
        return all(bytes.fromhex(boot) in engine.worked for engine in engines)

    wait_until(done, 60, "stores and loads of every engine")


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


def hit(client: WireClient, namespace: bytes, token: int) -> int:
    """The tokens that a LOOKUP finds, of a client that has registered nothing."""
    registered = m.Registered(namespace, MemoryLayoutDesc(CHUNK, ()))
    return client.hit(key_for(registered, [token] * CHUNKS * CHUNK, model_name="m"))


def boot_of(server: ServerProcess) -> str:
    return str(server.status()["server"]["boot_id"])
