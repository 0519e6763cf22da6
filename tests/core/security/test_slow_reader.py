"""A client over TCP that reads slowly is sent what it asked for, never what lies there by then."""

from __future__ import annotations

import pytest

from kvframework import errors
from kvframework.wire import messages as m
from kvframework.wire.frames import split
from kvframework.wire.messages import RetrievePlan
from kvframework.wire.transfer_blocks import pack_indices
from tests.core.server.in_process import serving
from tests.core.wire_path.remote import RemoteServer, held, remote_server
from tests.core.wire_path.stalling_proxy import StallingProxy
from tests.support.ports import free_port
from tests.support.server_process import fixture_of
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

CHUNKS = 24
TOKENS = list(range(CHUNKS * 256))
WIDE = 256  # 1 MiB an object


server = fixture_of(
    remote_server, "server.chunk_size=256", "server.retrieve_lease_s=1", curve=False, capacity="32MiB", scope="module"
)


def ask(client: WireClient, plan: RetrievePlan) -> None:
    client.send("RETRIEVE_CPU_CHUNKS", m.RetrieveCpuChunks(plan.lease, pack_indices(range(CHUNKS))))


def received(client: WireClient) -> list[bytes]:
    assert client.socket.poll(20_000)
    envelope = split(client.socket.recv_multipart())
    assert envelope.type == "RETRIEVE_CPU_CHUNKS"
    return [bytes(buffer) for buffer in envelope.buffers]


def test_what_a_stalled_client_is_sent_is_kept_for_it(server: RemoteServer) -> None:
    with server.local() as owner, StallingProxy(int(server.tcp.rpartition(":")[2]), after=1 << 20) as proxy:
        registered = owner.register(1, hidden_dim_size=WIDE)
        theirs = key_for(registered, TOKENS, cache_salt="slow")
        assert owner.store(theirs, b"A")
        with WireClient(proxy.endpoint) as slow:
            slow.register(2, hidden_dim_size=WIDE)
            plan = slow.prepare_retrieve(theirs, 2)
            ask(slow, plan)
            wait_until(proxy.stalled.is_set, what="the middle of the answer")
            wait_until(lambda: owner.status()["l1"]["counters"]["lapsed"], what="the end of the client's own pins")
            # Everybody else may use what is free, and no more.
            owner.call("CLEAR", m.Clear())
            secret = key_for(registered, TOKENS, cache_salt="secret")
            stored = owner.store(secret, b"B")
            assert stored is None or stored.outcome.stored < CHUNKS
            proxy.release()
            assert all(content == b"A" * len(content) for content in received(slow))
            assert slow.call("COMMIT_RETRIEVE", m.LeaseRef(plan.lease)).held is False
            slow.call("GOODBYE", m.Empty())
        owner.call("END_SESSION", m.EndSession())
        wait_until(lambda: held(owner) == (0, 0, 0, 0), what="the end of the send")
        assert owner.call("CLEAR", m.Clear()).in_use == 0


def test_what_one_client_leaves_unread_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvframework.service.chunks_over_wire.MAX_UNSENT_BYTES", 60 << 20)
    port = free_port()
    with (
        serving(
            "server.chunk_size=256", f"server.tcp=tcp://127.0.0.1:{port}", "server.insecure=true", capacity="32MiB"
        ) as running,
        WireClient(running.endpoint) as owner,
        StallingProxy(port, after=1 << 20) as proxy,
    ):
        registered = owner.register(1, hidden_dim_size=WIDE)
        key = key_for(registered, TOKENS)
        assert owner.store(key, b"A")
        with WireClient(proxy.endpoint) as slow, WireClient(f"tcp://127.0.0.1:{port}") as other:
            slow.register(2, hidden_dim_size=WIDE)
            plan = slow.prepare_retrieve(key, 2)
            for _ in range(5):  # 24 MiB each
                ask(slow, plan)
            wait_until(lambda: owner.status()["messaging"]["counters"].get("errors.protocol.too_large"))
            other.register(3, hidden_dim_size=WIDE)
            theirs = other.prepare_retrieve(key, 3)
            ask(other, theirs)
            assert len(received(other)) == CHUNKS, "others are served"
            other.call("COMMIT_RETRIEVE", m.LeaseRef(theirs.lease))
            other.call("GOODBYE", m.Empty())
            proxy.release()
            answers = []
            for _ in range(5):
                try:
                    answers.append(len(received_or_error(slow)))
                except errors.MessageTooLarge:
                    answers.append(0)
            assert answers.count(CHUNKS) == 2
            slow.call("GOODBYE", m.Empty())
        wait_until(lambda: held(owner) == (0, 0, 0, 0), what="the end of the send")


def received_or_error(client: WireClient) -> list[memoryview]:
    assert client.socket.poll(20_000)
    frames = client.socket.recv_multipart()
    envelope = split(frames)
    if envelope.type == "ERROR":
        raise errors.MessageTooLarge("refused")
    return list(envelope.buffers)
