"""Servers that end in order: a clean stop, a reload, a takeover with and without a keeper, and a keeper that dies. Hits
stay, and a range stays with a writer that lives over it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kvframework.errors import KVFrameworkError
from kvframework.wire import messages as m
from tests.core.restart.prompts import CAPACITY, OBJECT, hits, overwrite_all, store
from tests.support.held_server import HeldServer
from tests.support.processes import has_ended
from tests.support.server_process import ServerProcess, fixture_of
from tests.support.waiting import wait_until
from tests.support.wire_client import key_for

pytestmark = pytest.mark.timeout(300)

KNOWN = range(8)


server = fixture_of(HeldServer, capacity=CAPACITY)


def stopped(server: HeldServer) -> None:
    pid = server.pid
    os.kill(pid, signal.SIGTERM)
    server.serving(pid)
    assert "ended with status 0" in server.keeper()["last_end"]


def reloaded(server: HeldServer) -> None:
    pid = server.pid
    reply = server.keeper("reload")
    assert reply["done"], reply
    assert has_ended(pid)
    server.serving(pid)


def adopted(server: HeldServer) -> None:
    server.process.kill()
    server.process.wait()
    server.adopt()


def taken_over(server: ServerProcess) -> None:
    assert server.take_over() == 0, server.log


@pytest.mark.parametrize("change", [stopped, reloaded, adopted])
def test_with_a_keeper(server: HeldServer, change: Callable[[HeldServer], None]) -> None:
    keeps_all(server, change)
    server.kill9()
    server.start()
    with server.client() as client:
        assert client.status()["l1"]["recovered"]["why_cold"] == ""


def test_ends_in_order_are_no_failed_starts(server: HeldServer) -> None:
    """However soon they come."""
    with server.client() as client:
        store(client, 1, KNOWN)
    for _ in range(4):
        stopped(server)
    assert server.recovered()["objects"] == len(KNOWN)


def test_a_configuration_that_keeps_nothing_frees_what_was_kept(tmp_path: Path) -> None:
    file = tmp_path / "kvf.toml"
    file.write_text('[l1]\nkeep = "auto"\n')
    with HeldServer(capacity=CAPACITY, more=("--config", str(file))) as server:
        assert {each["name"] for each in server.keeper()["held"]} == {"kvf-arena", "kvf-journal"}
        file.write_text('[l1]\nkeep = "off"\n')
        server.kill9()
        server.start()
        wait_until(lambda: not server.keeper()["held"], 60.0, "the end of what was kept")
        assert server.recovered()["why_cold"] == "no_keeper"


def test_without_a_keeper() -> None:
    with ServerProcess(capacity=CAPACITY) as server:
        keeps_all(server, taken_over)
        # What was taken over can be handed over.
        keeps_all(server, taken_over)


def keeps_all(server: ServerProcess, change: Callable[..., None]) -> None:
    with server.client() as writer:
        store(writer, 1, KNOWN)
        key = key_for(writer.register(2), [700] * 512)
        plan = writer.prepare_store(key, 2)
        offsets = {place.offset for place in plan.ranges}
        assert offsets
        change(server)
        with server.client() as other:
            l1 = other.status()["l1"]
            assert l1["recovered"]["why_cold"] == "", server.log
            assert l1["quarantined_bytes"] == len(offsets) * OBJECT
            assert hits(other, 3, KNOWN) == len(KNOWN)
            assert overwrite_all(other, 4).isdisjoint(offsets)
            writer.write(plan, b"late")
            with pytest.raises(KVFrameworkError):
                other.call("COMMIT_STORE", m.LeaseRef(plan.lease))
            assert other.retrieve(key, 4) is None
    with server.client() as other:
        wait_until(lambda: other.status()["l1"]["quarantined_bytes"] == 0, 60, "the end of quarantine")
        assert offsets <= overwrite_all(other, 5, first=5000)
        assert other.call("CLEAR", m.Clear()).in_use == 0


def test_the_server_of_a_killed_keeper_serves_on(server: HeldServer) -> None:
    assert server.process is not None
    with server.client() as client:
        store(client, 1, KNOWN)
        server.process.kill()
        server.process.wait()
        # Its journal grows, it has new clients, and nothing is kept any more.
        overwrite_all(client, 2)
        store(client, 3, KNOWN)
        assert hits(client, 4, KNOWN) == len(KNOWN)
    adopted(server)
    with server.client() as client:
        assert hits(client, 1, KNOWN) == len(KNOWN)


def test_a_second_keeper_does_not_disturb_the_server_of_a_killed_one(server: HeldServer) -> None:
    assert server.process is not None
    pid = server.pid
    with server.client() as client:
        store(client, 1, KNOWN)
    server.process.kill()
    server.process.wait()
    server._begin()
    assert server.process.wait(60) == 2
    assert f"process {pid}" in server.log
    with server.client() as client:
        assert client.status()["server"]["pid"] == pid
        assert hits(client, 1, KNOWN) == len(KNOWN)
    os.kill(pid, signal.SIGKILL)
    server.process = None
