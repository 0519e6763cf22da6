"""Strangers who open more connections than the server has descriptors: it goes on, and so do all that are in."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
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
from kvframework.messaging.server import admission
from kvframework.messaging.server.admission import (
    MAX_NETWORKS,
    Admission,
    Gate,
    drop_new_connections,
    network_of,
    shown,
)
from kvframework.wire import messages as m
from tests.core.wire_path.remote import RemoteServer, remote_server
from tests.events.node import Router
from tests.events.node import settings as telling
from tests.support.ports import free_port
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
            assert server.process.process is not None
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
    found = doors(server)
    return all(found[door] is True for door in ("tcp", "sessions", "local")) and not found["shut_out"]


def test_strangers_from_everywhere_leave_room_for_those_of_this_machine(server: RemoteServer) -> None:
    before = server.process.status()["messaging"]["counters"]["tcp_shut"]
    with two_inside(server) as inside:
        with crowd(*tcp_of(server)) as strangers:
            assert sorted(served_while(server, strangers, inside))[-2] < 2.0
            wait_until(lambda: doors(server)["tcp"] is False, what="the shut door")
            seen = server.process.status()  # a new client of this machine
            assert seen["messaging"]["descriptors"]["in_use"] < admission.LOCAL_SHARE * LIMIT
            assert any("new TCP connections are not accepted" in each["fact"] for each in seen["problems"])
            assert seen["messaging"]["counters"]["tcp_shut"] > before
            assert all(client.usable for client in inside)
        wait_until(lambda: all_doors_open(server), what="the open doors")
        with server.connect() as late:
            assert late.wait_up(20)
    assert "descriptors are in use: new TCP connections wait" in server.process.log
    assert "descriptors are in use: new connections are accepted again" in server.process.log


def test_one_address_keeps_no_other_out(server: RemoteServer) -> None:
    with crowd(*tcp_of(server), "127.9.9.9") as strangers:
        wait_until(lambda: "127.9.9.9" in str(doors(server)["shut_out"]), what="the greedy one")
        # Until it was shut out, it may have had enough for the door of all.
        wait_until(lambda: doors(server)["tcp"] is True, 60, "the others' door")
        assert "127.0.0.1" not in str(doors(server)["shut_out"])
        with server.connect() as client:
            assert client.wait_up(20)
        assert strangers.poll() is None
    wait_until(lambda: all_doors_open(server), what="the open doors")
    assert "127.9.9.9 holds" in server.process.log


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
    assert "descriptors are in use: new clients are refused" in server.process.log


def test_a_crowd_at_the_liveness_socket_takes_a_few_descriptors_only(server: RemoteServer) -> None:
    most = LIMIT * 0.2
    with two_inside(server) as inside, crowd("ipc", ipc_of(server) + ".live", count=LIMIT // 2 + 100) as strangers:
        served_while(server, strangers, inside)
        assert len(descriptors(server.process.pid)) < most
    wait_until(lambda: len(descriptors(server.process.pid)) < 64, what="their descriptors")


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_crowd_at_the_sockets_of_events_keeps_out_readers_alone(kind: str) -> None:
    """libzmq ends a process that has no descriptor left for a connection over ipc://."""
    port = free_port()
    with ServerProcess() as server:
        server.stop()
        folder = server.endpoint.removeprefix("ipc://").removesuffix("/s.sock")
        at_tcp = {"replay": f"tcp://127.0.0.1:{port}", "insecure": "true"} if kind == "tcp" else {}
        server.set(*telling(folder, **at_tcp))
        server.start()
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        where = ["ipc", f"{folder}/again.sock"] if kind == "ipc" else ["tcp", "127.0.0.1", str(port)]
        with crowd(*where) as strangers:
            assert strangers.stdout is not None
            assert int(strangers.stdout.readline()) > LIMIT / 3
            seen = server.status()  # a new client
            found = seen["messaging"]["descriptors"]
            assert (found["readers"], found["sessions"], found["local"]) == (False, True, True)
            assert any("new readers of events are not accepted" in each["fact"] for each in seen["problems"])
        wait_until(lambda: server.status()["messaging"]["descriptors"]["readers"], what="the open door")
        replay = f"ipc://{folder}/again.sock" if kind == "ipc" else f"tcp://127.0.0.1:{port}"
        with contextlib.closing(Router(f"ipc://{folder}/told.sock", replay)) as reader:
            assert reader.read(20)


def test_a_client_learns_why_the_socket_is_not_there(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "s.full").touch()
    with KVClient(f"ipc://{tmp_path}/s") as client:
        wait_until(lambda: isinstance(client._connection.last_error, ServerFull))
        with pytest.raises(ServerFull, match="its descriptors run low"):
            client.raise_down()


# the filter in the kernel


@pytest.mark.parametrize(("family", "host", "other"), [("INET", "127.0.0.1", "127.0.0.2"), ("INET6", "::1", "fd00::1")])
def test_the_kernel_drops_newcomers_of_whom_it_was_told(family: str, host: str, other: str) -> None:
    with socket.create_server((host, 0), family=socket.AddressFamily[f"AF_{family}"]) as listener:
        place = (host, listener.getsockname()[1])
        others = [network_of(other), *(network_of(f"10.0.{number}.1") for number in range(MAX_NETWORKS))]
        with socket.create_connection(place, timeout=5) as inside:
            for everybody, networks in (
                (True, ()),
                (False, [network_of(host)]),
                (False, [others[0], network_of(host)]),
            ):
                drop_new_connections(listener, everybody=everybody, networks=networks)
                with pytest.raises(TimeoutError):
                    socket.create_connection(place, timeout=0.05)
            for networks in (others, ()):
                drop_new_connections(listener, everybody=False, networks=networks)
                socket.create_connection(place, timeout=5).close()
            served, _ = listener.accept()
            with served:
                inside.sendall(b"still here")
                assert served.recv(20) == b"still here"


def test_peers_are_counted_by_address() -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True))
        port = listener.getsockname()[1]
        gate = Gate([listener.dup()], None, dict.fromkeys(("tcp_shut", "local_shut", "peers_shut_out"), 0))
        stack.callback(gate.close)
        for host in ("::1", "127.0.0.1", "127.0.0.1"):
            stack.enter_context(socket.create_connection((host, port), timeout=5))
            stack.enter_context(listener.accept()[0])
        peers = gate._peers()
        assert peers is not None
        assert {shown(each): count for each, count in peers.items()} == {"::/64": 1, "127.0.0.1": 2}


def test_the_doors_of_tcp_shut_where_the_local_socket_was_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As what cleans temporary folders does: one door that cannot be shut leaves no other open."""

    def show(_shown: bool) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        gate = Gate([listener.dup()], show, dict.fromkeys(("tcp_shut", "local_shut", "peers_shut_out"), 0))
        monkeypatch.setattr(admission, "descriptors_in_use", lambda: 900)
        monkeypatch.setattr(admission, "descriptor_limit", lambda: 1000)
        try:
            for _ in range(2):
                with contextlib.suppress(FileNotFoundError):
                    gate._look_at_all()
            assert gate.status()["tcp"] is False
            with pytest.raises(TimeoutError):
                socket.create_connection(listener.getsockname(), timeout=0.05)
        finally:
            gate.close()


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::7%eth0", "fe80::/64"),
    ],
)
def test_a_peer_is_an_address_or_a_network(host: str, peer: str) -> None:
    assert shown(network_of(host)) == peer


# the doors, pure

PEERS = st.dictionaries(st.sampled_from([bytes([number] * 4) for number in range(4)]), st.integers(0, 5000))


@given(st.lists(st.tuples(st.integers(0, 5000), st.none() | PEERS), max_size=8), st.integers(64, 4096))
def test_doors_shut_at_their_share_and_open_a_little_below(looks: list[tuple[int, None]], limit: int) -> None:
    now = Admission()
    for in_use, peers in looks:
        before, now = now, now.after(in_use, limit, peers)
        for is_open, share in (
            (now.readers, admission.READERS_SHARE),
            (now.tcp, admission.TCP_SHARE),
            (now.sessions, admission.SESSIONS_SHARE),
            (now.local, admission.LOCAL_SHARE),
        ):
            assert not (is_open and in_use >= share * limit)
            assert is_open or in_use >= admission.REOPEN_SHARE * share * limit
        assert now.tcp or not before.tcp or in_use >= admission.TCP_SHARE * limit
        assert admission.SOONEST_S <= now.look_again_in(in_use, limit) <= admission.LATEST_S
        if peers is None:
            assert now.shut_out == before.shut_out
        else:
            assert all(count >= admission.REOPEN_SHARE * admission.ADDRESS_SHARE * limit for _, count in now.shut_out)


def test_the_greediest_are_held_off_where_there_are_too_many() -> None:
    peers = {number.to_bytes(4, "big"): number for number in range(1000)}
    shut_out = Admission().after(0, 1024, peers).shut_out
    assert [count for _, count in shut_out] == list(range(999, 999 - MAX_NETWORKS, -1))
