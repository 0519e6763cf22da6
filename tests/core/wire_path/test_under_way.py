"""What happens while bulk is under way: deaths, silence, lookups, lost pins, the end of the server."""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kvframework.client import KVClient  # noqa: E402
from kvframework.wire import messages as m  # noqa: E402
from tests.core.wire_path import store_program  # noqa: E402
from tests.core.wire_path.remote import RemoteServer, held, remote_server  # noqa: E402
from tests.core.wire_path.stalling_proxy import StallingProxy  # noqa: E402
from tests.support.engines import BLOCK, PagedEngine  # noqa: E402
from tests.support.line_process import LineProcess  # noqa: E402
from tests.support.server_process import fixture_of  # noqa: E402
from tests.support.waiting import wait_until  # noqa: E402
from tests.support.wire_client import WireClient  # noqa: E402

pytestmark = pytest.mark.torch

TOKENS = list(range(1024))
BLOCKS, OTHERS = list(range(64)), list(range(64, 128))
WIDE = 512  # 2 MiB an object, 8 MiB a store
AFTER = 1 << 20


server = fixture_of(remote_server, "server.session_timeout_s=2", "server.retrieve_lease_s=2", curve=False)


@pytest.fixture
def watcher(server: RemoteServer) -> Iterator[WireClient]:
    with server.local() as client:
        yield client


@contextmanager
def proxy_of(server: RemoteServer) -> Iterator[StallingProxy]:
    with StallingProxy(int(server.tcp.rpartition(":")[2]), after=AFTER) as proxy:
        yield proxy


@contextmanager
def worker(proxy: StallingProxy, instance_id: int = 50, fill: float = 1.0) -> Iterator[LineProcess]:
    """A worker process whose store stands still in the middle."""
    arguments = ("-m", store_program.__name__, proxy.endpoint, str(instance_id), str(fill), str(WIDE))
    with LineProcess(*arguments) as started:
        assert started.hear() == "ready"
        started.tell()
        wait_until(proxy.stalled.is_set, what="the middle of the store")
        yield started


@contextmanager
def engine_at(endpoint: str, instance_id: int = 1, scale: float = 4.0) -> Iterator[PagedEngine]:
    with KVClient(endpoint, deadline_scale=scale) as client:
        assert client.wait_up(20)
        yield PagedEngine(client, instance_id, blocks=128, wide=WIDE)


def test_kill_9_in_the_middle_of_a_store_publishes_nothing(server: RemoteServer, watcher: WireClient) -> None:
    with proxy_of(server) as proxy, engine_at(server.process.endpoint) as other:
        request = other.request(TOKENS)
        with worker(proxy) as dying:
            dying.signal(signal.SIGKILL)
            proxy.release()
            assert other.scheduler.lookup(request).hit_tokens == 0
            wait_until(lambda: 50 not in watcher.status()["non_gpu_instance_ids"], what="the end of the dead worker")
        assert other.scheduler.lookup(request).hit_tokens == 0
        wait_until(lambda: held(watcher) == (0, 0, 0, 0))
        assert watcher.status()["l1"]["objects"] == 0
        assert other.store(request, BLOCKS)
        assert other.retrieve(request, OTHERS)
        assert torch.equal(other.tokens(OTHERS), other.tokens(BLOCKS))


def test_a_stopped_worker_holds_up_nobody_and_may_go_on(server: RemoteServer, watcher: WireClient) -> None:
    with proxy_of(server) as proxy, engine_at(server.process.endpoint) as other:
        request = other.request(TOKENS)
        with worker(proxy) as stopped:
            stopped.signal(signal.SIGSTOP)
            proxy.release()
            assert other.scheduler.lookup(request).hit_tokens == 0
            wait_until(lambda: held(watcher) == (0, 0, 0, 0))
            assert other.store(request, BLOCKS), "the keys are free for another writer"
            wait_until(lambda: 50 not in watcher.status()["non_gpu_instance_ids"], what="the end of its session")
            stopped.signal(signal.SIGCONT)
            assert stopped.hear() in ("True", "False")
        assert other.retrieve(request, OTHERS)
        assert torch.equal(other.tokens(OTHERS), other.tokens(BLOCKS)), "of another writer, not of the one that woke up"
        wait_until(lambda: held(watcher) == (0, 0, 0, 0))


def test_control_is_answered_while_bulk_stands_still(server: RemoteServer, watcher: WireClient) -> None:
    """Both ways: the store's frames are stuck before the server, and the connection is the same client's."""
    with proxy_of(server) as proxy, engine_at(proxy.endpoint) as engine:
        results: list[bool] = []
        thread = threading.Thread(target=lambda: results.append(engine.store(engine.request(TOKENS), BLOCKS)))
        thread.start()
        wait_until(proxy.stalled.is_set, what="the middle of the store")
        for _ in range(20):
            assert engine.client.request("PING", m.Empty(), m.Pong)
            assert engine.scheduler.lookup(engine.request(TOKENS)).hit_tokens == 0
        assert engine.scheduler.failures == 0
        assert thread.is_alive(), "all of that was answered before the bulk"
        proxy.release()
        thread.join(20)
        assert results == [True]
        assert engine.scheduler.lookup(engine.request(TOKENS)).hit_tokens == 1024


def test_the_server_stops_cleanly_while_it_sends(server: RemoteServer) -> None:
    with engine_at(server.tcp, 2) as writer:
        assert writer.store(writer.request(TOKENS), BLOCKS)
    with proxy_of(server) as proxy, engine_at(proxy.endpoint) as engine:
        results: list[bool] = []
        thread = threading.Thread(target=lambda: results.append(engine.retrieve(engine.request(TOKENS), OTHERS)))
        thread.start()
        wait_until(proxy.stalled.is_set, what="the middle of the retrieve")
        assert server.process.stop() == 0
        proxy.release()
        thread.join(20)
        assert results == [False]
    for complaint in ("stays mapped", "parts of the arena", "Traceback", "ERROR"):
        assert complaint not in server.process.log


def test_a_stopped_server_is_a_miss_within_a_moment(server: RemoteServer) -> None:
    with engine_at(server.tcp, scale=0.5) as engine:
        assert engine.store(engine.request([7] * 256), BLOCKS[:16])
        server.process.sigstop()
        try:
            assert engine.store(engine.request(TOKENS), BLOCKS) is False
            wait_until(lambda: not engine.client.usable, what="the client to notice")
        finally:
            server.process.sigcont()
        wait_until(lambda: engine.client.usable, what="the client to come back")
        assert engine.store(engine.request(TOKENS), BLOCKS)
        assert engine.retrieve(engine.request(TOKENS), OTHERS)
        assert torch.equal(engine.tokens(OTHERS), engine.tokens(BLOCKS))


def test_repeated_transfers_take_no_more_memory(server: RemoteServer, watcher: WireClient) -> None:
    def resident() -> int:
        pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    with engine_at(server.tcp) as engine:

        def rounds(count: int) -> None:
            for _ in range(count):
                watcher.call("CLEAR", m.Clear())
                assert engine.store(engine.request(TOKENS), BLOCKS)
                assert engine.retrieve(engine.request(TOKENS), OTHERS)

        rounds(8)
        before = resident()
        rounds(40)  # 320 MiB each way
        assert resident() - before < 48 << 20


def test_what_is_received_lies_in_memory_that_is_there(server: RemoteServer, watcher: WireClient) -> None:
    def faults() -> int:
        return int(Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()[7])

    blocks = list(range(192))  # 24 MiB
    with KVClient(server.tcp, deadline_scale=4.0) as client:
        engine = PagedEngine(client, blocks=len(blocks), wide=WIDE)

        def rounds(count: int) -> None:
            for _ in range(count):
                watcher.call("CLEAR", m.Clear())
                assert engine.store(engine.request(list(range(len(blocks) * BLOCK))), blocks)

        rounds(4)
        before = faults()
        rounds(8)
        # A tenth of the pages that came; half of them where malloc gives them back to the kernel and takes them again.
        assert faults() - before < 8 * (24 << 20) // mmap.PAGESIZE // 10
