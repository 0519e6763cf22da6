"""What an engine process may do at the worst moment, and what must not come of it: foreign bytes, leaks, crashes."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvframework.client import KVClient, WorkerAdapter  # noqa: E402
from kvframework.errors import AlreadyRegistered  # noqa: E402
from tests.support.engines import AXES, BLOCK, BLOCKS, DIM, HEADS, PagedEngine  # noqa: E402
from tests.support.server_process import ServerProcess, server_fixture  # noqa: E402
from tests.support.waiting import wait_until  # noqa: E402

pytestmark = pytest.mark.torch

TOKENS = list(range(1024))
ALL = [list(range(64))]


server = server_fixture()


class Gate:
    """An engine's event that comes when the test says so: the gather waits for it with its ranges in hand."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def synchronize(self) -> None:
        self.reached.set()
        assert self.open.wait(60)


def loads_its_own(engine: PagedEngine) -> bool:
    """Whether a load gives this engine, bit for bit, what it has stored."""
    before = {name: tensor.clone() for name, tensor in engine.kv.items()}
    for tensor in engine.kv.values():
        tensor.zero_()
    assert engine.worker.submit_retrieve(engine.request(TOKENS), 0, 1024, ALL).result(20)
    return all(torch.equal(engine.kv[name], before[name]) for name in before)


def test_closing_the_client_during_a_gather_frees_no_range_that_is_still_written(server: ServerProcess) -> None:
    with server.engine_client() as one, server.engine_client() as two:
        first, second = PagedEngine(one, 1), PagedEngine(two, 2)
        gate = Gate()
        late = threading.Thread(
            target=lambda: first.worker.submit_store(first.request(TOKENS), 0, 1024, ALL, event=gate).result(20)  # type: ignore[arg-type]
        )
        late.start()
        assert gate.reached.wait(60)
        one.close()
        stored = second.worker.submit_store(second.request([7] * 1024), 0, 1024, ALL)
        assert stored.result(20)
        gate.open.set()
        late.join(10)
        request = second.request([7] * 1024)
        before = {name: tensor.clone() for name, tensor in second.kv.items()}
        assert second.worker.submit_retrieve(request, 0, 1024, ALL).result(20)
        assert all(torch.equal(second.kv[name], before[name]) for name in before)
        with server.client() as watcher:
            wait_until(lambda: watcher.status()["l1"]["write_leases"] == 0, what="the end of the closed client")


def test_a_restart_between_arena_and_lease_publishes_nothing(server: ServerProcess) -> None:
    with server.engine_client() as client:
        engine = PagedEngine(client)
        begin: Any = client._begin
        boot = client.boot_id

        def after_a_restart(name: str, *rest: object, **options: object) -> object:
            if name == "PREPARE_STORE":
                server.kill9()
                server.start()
                wait_until(lambda: client.usable and client.boot_id != boot, what="the reconnect")
            return begin(name, *rest, **options)

        client._begin = after_a_restart  # type: ignore[method-assign, assignment]
        assert not engine.worker.submit_store(engine.request(TOKENS), 0, 1024, ALL).result(20).ok
        assert engine.scheduler.lookup(engine.request(TOKENS)).hit_tokens == 0
        with server.client() as watcher:
            l1 = watcher.status()["l1"]
            assert (l1["write_leases"], l1["objects"]) == (0, 0)
        client._begin = begin  # type: ignore[method-assign]
        assert engine.worker.submit_store(engine.request(TOKENS), 0, 1024, ALL).result(20)
        assert loads_its_own(engine)


def test_what_comes_too_late_is_given_back() -> None:
    short = ("server.store_lease_s=1", "server.retrieve_lease_s=1")
    with ServerProcess(*short) as server, KVClient(server.endpoint) as client, server.client() as watcher:
        assert client.wait_up(20)
        engine = PagedEngine(client)
        for token in range(3):
            wait_until(lambda: client.usable, what="the client to heal")
            server.sigstop()
            store = engine.worker.submit_store(engine.request([token] * 1024), 0, 1024, ALL)
            server.sigcont()
            store.result(20)
        wait_until(lambda: watcher.status()["l1"]["write_leases"] == 0, what="the late leases to be given back")
        assert watcher.status()["l1"]["quarantined_bytes"] == 0
        wait_until(lambda: client.usable, what="the client to heal")
        assert engine.worker.submit_store(engine.request(TOKENS), 0, 1024, ALL).result(20)
        wait_until(lambda: client.usable, what="the client to heal")
        server.sigstop()
        lookup = engine.scheduler.lookup(engine.request(TOKENS))
        server.sigcont()
        assert lookup.hit_tokens == 0
        # Its PING comes after the LOOKUP, so that has been answered by then.
        wait_until(lambda: client.usable, what="the client to heal")
        wait_until(lambda: watcher.status()["tickets"] == 0, what="the late ticket to be freed")
        assert watcher.status()["l1"]["pins"] == 0


def test_a_failed_registration_can_be_closed(server: ServerProcess) -> None:
    with server.engine_client() as one, server.engine_client() as two:
        PagedEngine(one, 1)
        worker = WorkerAdapter(two, instance_id=1, model_name="m", layout_options={"axes": AXES})
        kv = {"layer0": torch.zeros(2, BLOCKS, BLOCK, HEADS, DIM)}
        with pytest.raises(AlreadyRegistered):
            worker.register_kv_caches(kv, block_size=BLOCK)
        worker.close()
        assert worker.registration is None


def test_a_restart_in_mid_registration_loses_nothing(server: ServerProcess) -> None:
    with server.engine_client() as client:
        when_up, boot = client.when_up, client.boot_id

        def after_a_restart(callback: object) -> None:
            server.kill9()
            server.start()
            wait_until(lambda: client.usable and client.boot_id != boot, what="the reconnect")
            when_up(callback)  # type: ignore[arg-type]

        client.when_up = after_a_restart  # type: ignore[method-assign, assignment]
        engine = PagedEngine(client)
        assert engine.worker.submit_store(engine.request(TOKENS), 0, 1024, ALL).result(20)


# An engine that stores all the while; its server is killed, or its client closed, in mid-copy.
COPIER = """
import faulthandler, os, sys, threading
faulthandler.enable()
import torch
torch.set_num_threads(1)
from kvframework.client import KVClient, RequestHashes, WorkerAdapter
client = KVClient(sys.argv[1], deadline_scale=20.0)
assert client.wait_up(20)
kv = {f"l{i}": torch.randn(2, 512, 16, 4, 32) for i in range(4)}
worker = WorkerAdapter(client, instance_id=1, model_name="m", layout_options={"axes": AXES})
worker.register_kv_caches(kv, block_size=16)
ids = torch.randperm(512).tolist()
print("ready", flush=True)
for round_ in range(10000):
    request = RequestHashes(client.hasher, 256, request_id=f"r{round_}")
    request.extend([round_] * (512 * 16))
    stored = worker.submit_store(request, 0, 512 * 16, [ids]).result(30)
    worker.get_finished()
    if sys.argv[2] == "close" and round_ == 3:
        threading.Timer(0.05, client.close).start()
    if not client.usable and round_ > 3:
        break
print("survived", flush=True)
"""


@pytest.mark.parametrize("how", ["kill", "close"])
def test_an_engine_survives_the_end_of_its_arena_in_mid_copy(how: str) -> None:
    with ServerProcess("server.chunk_size=256", capacity="256MiB") as server:
        engine = subprocess.Popen(
            [sys.executable, "-c", f"AXES = {AXES!r}\n{COPIER}", server.endpoint, how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert engine.stdout.readline().strip() == "ready", engine.communicate()[1]
            if how == "kill":
                with server.client() as watcher:
                    wait_until(lambda: watcher.status()["l1"]["counters"].get("stored", 0) > 64, what="some stores")
                server.kill9()
            out, err = engine.communicate(timeout=240)
        finally:
            engine.kill()
            engine.communicate()
        assert (engine.returncode, out.strip()) == (0, "survived"), err
