"""`cpu_gather` registers the arena with the device of the engine's tensors, anew with each server, until no copy runs.

The runtime is a recorder: what torch offers for CUDA, offered here for host memory. Server and engine are real."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator

import pytest

from kvf_dev.testing.transport.engine import PATIENCE_S
from kvframework.api.copying import address_of
from kvframework.api.transport import Arena
from kvframework.client import KVClient, RequestHashes, WorkerAdapter
from tests.support.lazy import torch
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.torch


class Recorder:
    """Records what is registered, and whether it was mapped all the time."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: dict[int, int] = {}
        self.calls: list[tuple[str, int]] = []
        self.threads: set[str] = set()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert mapped(address) >= nbytes
        assert flags == 1
        self.threads.add(threading.current_thread().name)
        self.calls.append(("register", address))
        if not self.error:
            self.registered[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert mapped(address) >= self.registered.pop(address)
        self.calls.append(("unregister", address))
        return 0


def mapped(address: int) -> int:
    """The bytes that are mapped from an address on, 0 if none are."""
    with open("/proc/self/maps") as file:
        ends = [line.split(None, 1)[0].split("-") for line in file]
    return next((int(end, 16) - address for begin, end in ends if int(begin, 16) <= address < int(end, 16)), 0)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(torch.cpu, "cudart", lambda: made, raising=False)
    return made


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess("server.chunk_size=16") as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[KVClient]:
    with KVClient(server.endpoint) as connected:
        assert connected.wait_up(PATIENCE_S)
        yield connected


@pytest.fixture
def caches() -> dict[str, torch.Tensor]:
    return {"l0": torch.randn(2, 8, 16, 2, 4)}


def registered(client: KVClient, caches: dict[str, torch.Tensor], **options: object) -> WorkerAdapter:
    groups = {"groups": [{"layers": ["l*"], "axes": ["plane", "block", "token", "head", "dim"], "block_size": 16}]}
    adapter = WorkerAdapter(
        client,
        instance_id=1,
        model_name="m",
        transport="cpu_gather",
        transport_options=options,
        layout="paged",
        layout_options=groups,
    )
    adapter.register_kv_caches(caches, block_size=16)
    return adapter


def comes_back(client: KVClient, adapter: WorkerAdapter, caches: dict[str, torch.Tensor]) -> bool:
    request = RequestHashes(client.hasher, 16, request_id="r")
    request.extend(range(32))
    want = caches["l0"][:, [1, 2]].clone()
    wait_until(lambda: adapter.submit_store(request, 0, 32, [[1, 2]]).result(PATIENCE_S), PATIENCE_S, "a store")
    caches["l0"].zero_()
    loaded = adapter.submit_retrieve(request, 0, 32, [[1, 2]]).result(PATIENCE_S)
    return bool(loaded) and torch.equal(caches["l0"][:, [1, 2]], want)


def test_each_server_s_arena_is_registered_whole_until_its_end(
    server: ServerProcess, client: KVClient, caches: dict[str, torch.Tensor], recorder: Recorder
) -> None:
    adapter = registered(client, caches)
    wait_until(lambda: recorder.registered)
    assert client.arena is not None
    assert list(recorder.registered.values()) == [client.arena.view.nbytes]
    assert comes_back(client, adapter, caches)
    server.kill9()
    wait_until(lambda: not recorder.registered)
    server.start()
    wait_until(lambda: recorder.registered)
    assert comes_back(client, adapter, caches)
    adapter.close()
    wait_until(lambda: not recorder.registered)
    assert [call for call, _ in recorder.calls] == ["register", "unregister"] * 2
    assert recorder.threads == {"kvf-pin-arena"}, "the engine's thread waited for the driver"


@pytest.mark.parametrize("options", [{"pin": False}, {"path": "wire"}], ids=str)
def test_nothing_is_registered_that_no_copy_needs(
    client: KVClient, caches: dict[str, torch.Tensor], recorder: Recorder, options: dict[str, object]
) -> None:
    adapter = registered(client, caches, **options)
    assert comes_back(client, adapter, caches)
    adapter.close()
    assert recorder.calls == []


def test_what_the_driver_refuses_is_copied_without(
    client: KVClient, caches: dict[str, torch.Tensor], recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.error = 2
    adapter = registered(client, caches)
    wait_until(lambda: "is not registered with cpu (error 2)" in caplog.text)
    assert comes_back(client, adapter, caches)
    adapter.close()
    assert [call for call, _ in recorder.calls] == ["register"]


def test_a_copy_that_runs_keeps_the_arena_registered(recorder: Recorder) -> None:
    from kvf_cpu_gather.pinning import pinned

    memory = mmap.mmap(-1, 1 << 20)
    view = memoryview(memory)
    with address_of(view, True) as (address, _):
        pin = pinned(torch.device("cpu"), Arena(view, address))
    assert pin is not None
    wait_until(lambda: recorder.registered)
    with pin, pin:
        pin.end()
        with pin:
            pass
        time.sleep(0.2)  # a moment to make the mistake in
        assert recorder.registered
    wait_until(lambda: not recorder.registered)
