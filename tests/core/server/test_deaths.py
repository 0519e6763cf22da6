"""Death is normal and silence is not death: kill -9 and SIGSTOP of real writer and reader processes, others at work."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvframework import errors
from kvframework.wire import messages as m
from tests.support.line_process import LineProcess
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

TOKENS = [5] * 1024
LEASE_S = 0.5

# Prepares a store (or a retrieve), says so, and on a line from stdin writes its bytes and commits.
WORKER = """
import sys
from kvframework import errors
from kvframework.wire import messages as m
from tests.support.processes import send
from tests.support.wire_client import WireClient, key_for
endpoint, what = sys.argv[1:]
client = WireClient(endpoint, timeout=20)
registered = client.register(instance_id=50)
key = key_for(registered, [5] * 1024)
plan = client.prepare_store(key, 50) if what == "store" else client.prepare_retrieve(key, 50)
print("prepared", plan.lease, flush=True)
sys.stdin.readline()
if what == "store":
    client.write(plan, b"LATE")
    print("committed", client.call("COMMIT_STORE", m.LeaseRef(plan.lease)).outcome.stored, flush=True)
else:
    print("held", client.call("COMMIT_RETRIEVE", m.LeaseRef(plan.lease)).held, flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(f"server.store_lease_s={LEASE_S}", f"server.retrieve_lease_s={LEASE_S}") as process:
        yield process


@pytest.fixture(autouse=True)
def _empty(server: ServerProcess) -> None:
    with server.client() as client:
        client.call("CLEAR", m.Clear())


@contextmanager
def worker(server: ServerProcess, what: str) -> Iterator[LineProcess]:
    """A worker process that has prepared its transfer."""
    with LineProcess("-c", WORKER, server.endpoint, what) as process:
        process.hear()
        yield process


@contextmanager
def storing(client: WireClient, registered: m.Registered) -> Iterator[None]:
    """Another worker that stores and reads back its own content all the while, in a thread; fails on a foreign byte."""
    stop = threading.Event()
    wrong: list[object] = []

    def work() -> None:
        round_ = 0
        while not stop.is_set() and not wrong:
            round_ += 1
            fill = b"%08d" % round_
            key = key_for(registered, [1000 + round_] * 256)
            client.store(key, fill)
            found = client.retrieve(key)
            if found is not None and found != (fill * len(found))[: len(found)]:
                wrong.append(found[:64])

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert wrong == []


def quarantined(watcher: WireClient) -> int:
    return int(watcher.status()["l1"]["quarantined_bytes"])


def test_kill_9_between_prepare_and_commit_publishes_nothing(server: ServerProcess) -> None:
    with server.client() as busy, server.client() as watcher:
        registered = busy.register(instance_id=1)
        watcher.register(instance_id=2)
        key = key_for(registered, TOKENS)
        with storing(busy, registered), worker(server, "store") as writer:
            assert watcher.prepare_store(key, 2).outcome.in_flight == 4
            writer.signal(signal.SIGKILL)
            wait_until(lambda: not watcher.status()["l1"]["write_leases"] or not _holds(watcher, 50))
            wait_until(lambda: 50 not in watcher.status()["non_gpu_instance_ids"], what="the end of the dead worker")
            assert watcher.lookup(key).hit_tokens == 0
            assert watcher.retrieve(key, 2) is None
            plan = watcher.prepare_store(key, 2)
            assert len(plan.ranges) == 4, "its ranges are free again"
            watcher.call("ABORT", m.LeaseRef(plan.lease))
        assert quarantined(watcher) == 0


def _holds(watcher: WireClient, instance_id: int) -> bool:
    return instance_id in watcher.status()["non_gpu_instance_ids"]


def test_a_stopped_reader_is_told_that_its_pin_was_lost(server: ServerProcess) -> None:
    with server.client() as client:
        registered = client.register(instance_id=1)
        key = key_for(registered, TOKENS)
        client.store(key, b"READ")
        with worker(server, "retrieve") as reader:
            reader.signal(signal.SIGSTOP)
            wait_until(lambda: client.status()["l1"]["pins"] == 0, what="the lapse of the pins")
            reader.signal(signal.SIGCONT)
            assert reader.ask() == "held False"
        with worker(server, "retrieve") as reader:
            assert reader.ask() == "held True"


def test_a_lease_of_a_dead_client_is_nobodys(server: ServerProcess) -> None:
    with server.client() as client:
        registered = client.register(instance_id=1)
        lease = client.prepare_store(key_for(registered, [6] * 256)).lease
        with server.client() as other, pytest.raises(errors.LeaseUnknown):
            other.call("COMMIT_STORE", m.LeaseRef(lease))
