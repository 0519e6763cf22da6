"""Strangers who open more connections than the server has descriptors: it goes on, and so do all that are in."""

from __future__ import annotations

import contextlib
import resource
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.client import KVClient
from kvframework.errors import ServerFull
from kvframework.messaging.server import sockets as admission
from kvframework.messaging.server.sockets import Gate
from kvframework.wire import messages as m
from tests.core.wire_path.remote import RemoteServer, remote_server
from tests.events.node import Router
from tests.events.node import settings as telling
from tests.support.processes import descriptors
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

LIMIT = 1024


@pytest.fixture(scope="module")
def server() -> Iterator[RemoteServer]:
    with remote_server(capacity="8MiB") as running:
        resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        yield running


@contextlib.contextmanager
def crowd(*where: str, count: int = 3 * LIMIT, seconds: float = 0.7) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.core.security.crowd_program", *where, str(count), str(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def tcp_of(server: RemoteServer) -> list[str]:
    return ["tcp", *server.tcp.removeprefix("tcp://").rsplit(":", 1)]


def ipc_of(server: RemoteServer) -> str:
    return server.process.endpoint.removeprefix("ipc://")


def doors(server: RemoteServer) -> dict[str, object]:
    found: dict[str, object] = server.process.status()["messaging"]["descriptors"]
    return found


def served_while(server: RemoteServer, strangers: subprocess.Popen[str], clients: list[KVClient]) -> list[float]:
    """How long each answer took, until the crowd has come."""
    seconds = []
    assert strangers.stdout is not None
    with strangers.stdout as said:
        done = False
        while not done:
            done = _readable(said.fileno())
            for client in clients:
                began = time.monotonic()
                client.request("PING", m.Empty(), m.Pong, timeout=5.0)
                seconds.append(time.monotonic() - began)
            with contextlib.suppress(TimeoutError, ServerFull), server.process.client(timeout=0.5):
                pass  # who comes now may be refused, and must never end the server
            assert server.process.process.poll() is None, server.process.log
        assert int(said.readline()) > LIMIT / 3
    return seconds


def _readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


@contextlib.contextmanager
def two_inside(server: RemoteServer) -> Iterator[list[KVClient]]:
    with server.connect() as far, server.process.engine_client() as near:
        assert far.wait_up(20)
        yield [far, near]


def all_doors_open(server: RemoteServer) -> bool:
    return all(doors(server)[door] is True for door in ("sessions", "local"))


def test_strangers_over_tcp_disturb_no_client_that_is_in(server: RemoteServer) -> None:
    with two_inside(server) as inside:
        with crowd(*tcp_of(server)) as strangers:
            assert sorted(served_while(server, strangers, inside))[-2] < 2.0
            assert all(client.usable for client in inside)
        wait_until(lambda: Path(ipc_of(server)).exists() and all_doors_open(server), what="the open doors")
        with server.connect() as late:
            assert late.wait_up(20)
    assert server.process.status()["messaging"]["counters"]["local_shut"] > 0
    assert "open files are in use: new clients are refused" in server.process.log
    assert "new clients are accepted again:" in server.process.log


def test_clients_of_this_machine_are_refused_before_the_last_descriptor(server: RemoteServer) -> None:
    """Some handshakes and no word after them, as a fork of an engine that goes wild would make."""
    path = ipc_of(server)
    with two_inside(server) as inside, crowd("ipc", path, count=2 * LIMIT) as strangers:
        assert strangers.stdout is not None
        refused: list[Exception | None] = []

        def knock() -> bool:
            for client in inside:
                client.request("PING", m.Empty(), m.Pong, timeout=5.0)
            with KVClient(server.process.endpoint) as late:
                wait_until(lambda: late.usable or late._connection.last_error is not None)
                refused.append(late._connection.last_error)
            return isinstance(refused[-1], ServerFull)

        wait_until(knock, what="the refusal")
        assert refused[-1] is not None
        assert len(descriptors(server.process.pid)) < LIMIT
        assert all(client.usable for client in inside)
    wait_until(lambda: Path(path).exists() and all_doors_open(server), what="the open doors")
    assert "open files are in use: new clients are refused" in server.process.log


def test_a_crowd_at_the_liveness_socket_takes_a_few_descriptors_only(server: RemoteServer) -> None:
    most = LIMIT * 0.2
    with two_inside(server) as inside, crowd("ipc", ipc_of(server) + ".live", count=LIMIT // 2 + 100) as strangers:
        served_while(server, strangers, inside)
        assert len(descriptors(server.process.pid)) < most
    wait_until(lambda: len(descriptors(server.process.pid)) < 64, what="their descriptors")


def test_a_crowd_at_the_sockets_of_events_keeps_out_readers_alone() -> None:
    """libzmq ends a process that has no descriptor left for a connection over ipc://."""
    with ServerProcess() as server:
        server.stop()
        folder = server.endpoint.removeprefix("ipc://").removesuffix("/s.sock")
        server.set(*telling(folder))
        server.start()
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        with crowd("ipc", f"{folder}/again.sock") as strangers:
            assert int(strangers.stdout.readline()) > LIMIT / 3
            seen = server.status()  # a new client
            found = seen["messaging"]["descriptors"]
            assert (found["readers"], found["sessions"], found["local"]) == (False, True, True)
            assert any("new event readers are not accepted" in each["fact"] for each in seen["problems"])
        wait_until(lambda: server.status()["messaging"]["descriptors"]["readers"], what="the open door")
        with contextlib.closing(Router(f"ipc://{folder}/told.sock", f"ipc://{folder}/again.sock")) as reader:
            assert reader.read(20)


def test_a_client_learns_why_the_socket_is_not_there(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "s.full").touch()
    with KVClient(f"ipc://{tmp_path}/s") as client:
        wait_until(lambda: isinstance(client._connection.last_error, ServerFull))
        with pytest.raises(ServerFull, match="the server accepts no clients for now, because it has few open files"):
            client.raise_down()


# the doors, pure


class Counts:
    """A gate's view of the descriptors, and what its doors were told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
        self.in_use = 0
        self.told: dict[str, bool] = {}
        monkeypatch.setattr(admission, "descriptors_in_use", lambda: self.in_use)
        monkeypatch.setattr(admission, "descriptor_limit", lambda: limit)
        self.gate = Gate(lambda is_open: self._tell("local", is_open), {"local_shut": 0}, self._readers)

    def _readers(self, is_open: bool) -> None:
        self._tell("readers", is_open)

    def _tell(self, kind: str, is_open: bool) -> None:
        assert self.told.get(kind, True) != is_open
        self.told[kind] = is_open


@given(st.lists(st.integers(0, 5000), max_size=8), st.integers(64, 4096))
def test_doors_shut_at_their_share_and_open_a_little_below(looks: list[int], limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        counts = Counts(patch, limit)
        for counts.in_use in looks:
            again = counts.gate._look()
            for kind, share in (
                ("readers", admission.READERS_SHARE),
                ("sessions", admission.SESSIONS_SHARE),
                ("local", admission.LOCAL_SHARE),
            ):
                is_open = counts.gate.admits[kind]
                assert not (is_open and counts.in_use >= share * limit)
                assert is_open or counts.in_use >= admission.REOPEN_SHARE * (share * limit)
                assert kind == "sessions" or counts.told.get(kind, True) == is_open
            assert admission.SOONEST_S <= again <= admission.LATEST_S


def test_one_door_that_cannot_be_shut_leaves_no_other_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cleans temporary folders may have removed the local socket."""
    counts = Counts(monkeypatch, 1000)
    tell, counts.in_use = counts._tell, 900

    def fail_later(kind: str, is_open: bool) -> None:
        tell(kind, is_open)
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(counts, "_tell", fail_later)
    counts.gate._look()
    assert counts.told == {"readers": False, "local": False}
    assert counts.gate.status() == {"in_use": 900, "limit": 1000, "readers": False, "sessions": False, "local": False}
    with pytest.raises(ServerFull):
        counts.gate.check()
