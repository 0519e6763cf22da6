"""What comes over TCP: without keys nothing, with keys no more than an engine needs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvframework import errors
from kvframework.api.layout import KVLayout, LayerGroup
from kvframework.errors import CurveKeyError
from kvframework.messaging.curve import AdmittedClients, write_curve_pair
from kvframework.wire import messages as m
from kvframework.wire.frames import join, split
from tests.core.messaging.lab import HASHER, connected
from tests.core.wire_path.remote import Keys, RemoteServer, remote_server
from tests.support.server_process import fixture_of
from tests.support.wire_client import WireClient, key_for

TOKENS = list(range(512))


server = fixture_of(remote_server, scope="module")


@pytest.fixture
def remote(server: RemoteServer) -> Iterator[WireClient]:
    with WireClient(server.tcp, keys=server.keys.of("client")) as client:
        yield client
        client.call("GOODBYE", m.Empty())


def test_an_admitted_client_maps_nothing_and_manages_nothing(server: RemoteServer, remote: WireClient) -> None:
    assert remote.hello.liveness == ""
    registered = remote.register()
    key = key_for(registered, TOKENS)
    with pytest.raises(errors.TransportMismatch, match="this client has not mapped the arena"):
        remote.prepare_store(key)
    for l2 in (False, True):
        with pytest.raises(errors.RequestError, match="only a client on this node may clear"):
            remote.call("CLEAR", m.Clear(l2=l2))
    layout = KVLayout("paged", (LayerGroup(2, 16, 1, 8, "float32"),), num_blocks=4)
    with pytest.raises(errors.TransportMismatch):
        remote.call(
            "REGISTER_KV_CACHE", m.RegisterKvCache(9, "tiny", 1, 0, bytes(16), "cpu_gather", layout, (b"handle",))
        )
    assert remote.status()["server"]["tcp"] == server.tcp


def test_what_others_hold_is_out_of_its_reach(server: RemoteServer, remote: WireClient) -> None:
    with server.local() as owner:
        registered = owner.register(1)
        key = key_for(registered, TOKENS)
        assert owner.store(key, b"mine")
        plan, ticket = owner.prepare_retrieve(key), owner.lookup(key).ticket
        lease = m.LeaseRef(plan.lease)
        for name, payload in (
            ("UNREGISTER_KV_CACHE", m.Unregister(1)),
            ("COMMIT_STORE", lease),
            ("ABORT", lease),
            ("COMMIT_RETRIEVE", lease),
            ("RETRIEVE_CPU_CHUNKS", m.RetrieveCpuChunks(plan.lease, bytes(4))),
            ("QUERY_PREFETCH_STATUS", m.TicketRef(ticket)),
            ("FREE_LOOKUP_LOCKS", m.TicketRef(ticket)),
            ("PREPARE_RETRIEVE", m.Prepare(key, 1)),
            ("STORE_CPU_CHUNKS", m.StoreCpuChunks(key, 1)),
        ):
            with pytest.raises((errors.LeaseUnknown, errors.NotRegistered)):
                remote.call(name, payload)
        assert remote.call("CANCEL", m.Cancel(ticket=ticket)).found is False
        assert remote.call("END_SESSION", m.EndSession(key.request_id)) == m.SessionEnded(0, 0)
        assert owner.call("COMMIT_RETRIEVE", lease).held is True
        assert owner.call("FREE_LOOKUP_LOCKS", m.TicketRef(ticket)).pins == 2


def test_a_half_spoken_handshake_is_cut_off(server: RemoteServer) -> None:
    host, _, port = server.tcp.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as silent:
        silent.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f")
        while silent.recv(4096):
            pass


def test_strangers_do_not_make_the_server_read_its_keys_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys(tmp_path / "keys")
    now = [0.0]
    admitted = AdmittedClients(keys.clients, clock=lambda: now[0])
    looks: list[object] = []
    read = admitted._read
    monkeypatch.setattr(admitted, "_read", lambda changed_at: looks.append(1) or read(changed_at))
    for number in range(1000):
        now[0] = number / 1000
        assert admitted.name_of(b"%032d" % number) is None
    assert len(looks) <= 3
    keys.add("late")
    late = zmq.utils.z85.decode((keys.clients / "late.public").read_bytes().split()[1])
    assert admitted.name_of(late) == "late", "a file that was added counts at once"
    (keys.clients / "late.public").unlink()
    assert admitted.name_of(late) is None, "and one that was removed no more"


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_directory_of_keys_to_which_others_may_add_is_refused(tmp_path: Path, mode: int) -> None:
    keys = Keys(tmp_path / "keys")
    os.chmod(keys.clients, mode)
    with pytest.raises(CurveKeyError, match="other users may add keys:"):
        AdmittedClients(keys.clients)


def test_a_server_elsewhere_names_no_socket_of_this_machine(tmp_path: Path) -> None:
    """HELLO's `liveness` is a path; over TCP whoever answers could name any."""
    trap = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    trap.bind(str(tmp_path / "trap"))
    trap.listen()
    trap.setblocking(False)
    with trap, zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with connected(f"tcp://127.0.0.1:{port}", up=False) as connection:
            assert router.poll(10_000)
            identity, *frames = router.recv_multipart()
            reply = m.HelloReply(1, b"boot", bytes(16), 256, "sha256", HASHER, (), liveness=str(tmp_path / "trap"))
            router.send_multipart([identity, *join(split(frames).request_id, "HELLO", reply)])
            assert connection.wait_up(20)
            with pytest.raises(BlockingIOError):
                trap.accept()


def test_keys_are_made_for_their_owner(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_curve_pair(tmp_path / "s", tmp_path / "p")
    finally:
        os.umask(before)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "p").stat().st_mode & 0o777 == 0o644
