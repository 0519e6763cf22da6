"""One client keeps nothing from all the others, and no message of it takes more than it is worth."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest

from kvframework import errors
from kvframework.api.layout import KVLayout, LayerGroup, chunk_tokens_for
from kvframework.messaging.server.sessions import SessionTable
from kvframework.storage.tickets import MAX_LOADS
from kvframework.wire import messages as m
from kvframework.wire.frames import MAX_ERROR_TEXT
from tests.core.server.in_process import serving
from tests.support.redis_server import RedisServer
from tests.support.server_process import ServerProcess, client_fixture, server_fixture
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

TOKENS = list(range(1024))
NBYTES = 2 * 2 * 256 * 8 * 4  # of one object of WireClient's model


server = server_fixture(capacity="1MiB", scope="module")


client = client_fixture()


def prompt(number: int, chunks: int = 4) -> list[int]:
    return [number, *range(chunks * 256 - 1)]


def test_a_client_that_stands_still_leaves_others_their_share(client: WireClient, server: ServerProcess) -> None:
    """It reserves whatever it can, and commits nothing."""
    with server.client() as other:
        registered = client.register(1)
        other.register(2)
        placed = 0
        for number in range(16):
            plan = client.prepare_store(key_for(registered, prompt(number), request_id=str(number)))
            placed += len(plan.ranges)
            assert plan.outcome.dropped + len(plan.ranges) == 4, "what it does not get it is told"
        assert placed == (1 << 20) // 2 // NBYTES
        client.call("END_SESSION", m.EndSession())
        assert client.status()["l1"]["quarantined_bytes"] == 1 << 19, "it may still be writing there"
        assert not client.prepare_store(key_for(registered, prompt(17))).lease
        for number in range(32):
            stored = other.store(key_for(registered, prompt(100 + number)), b"x", 2)
            assert stored.outcome.stored == 4
    wait_until(lambda: len(client.status()["instances"]) == 1)
    assert len(client.prepare_store(key_for(registered, prompt(18))).ranges) == 4, "alone it may have all"


def test_alone_a_client_may_fill_all_of_l1(client: WireClient) -> None:
    registered = client.register()
    assert len(client.prepare_store(key_for(registered, prompt(1, 32))).ranges) == 32


@pytest.mark.redis
def test_loads_of_one_client_leave_room_for_others(tmp_path: Path) -> None:
    """A Redis that does not answer, and one client that asks for everything."""
    l2 = ("l2.0.use=redis", "l2.0.timeout_s=30")
    with (
        RedisServer(tmp_path) as redis,
        serving(*l2, f"l2.0.url={redis.url}") as running,
        WireClient(running.endpoint) as greedy,
        WireClient(running.endpoint) as modest,
    ):
        registered = greedy.register(1)
        redis.sigstop()
        try:
            answers = [greedy.lookup(key_for(registered, prompt(n), request_id=str(n))) for n in range(MAX_LOADS + 20)]
            assert [answer.pending for answer in answers] == [True] * MAX_LOADS + [False] * 20
            assert modest.lookup(key_for(registered, prompt(1))).pending
            unknown = key_for(registered, prompt(1), namespace=secrets.token_bytes(16))
            assert not greedy.lookup(unknown).pending, "also for a namespace that nobody knows"
        finally:
            redis.sigcont()
        greedy.call("END_SESSION", m.EndSession())
        table = running.service.lookups.tickets
        wait_until(lambda: not table._loading, 60, "the end of the loads")


def test_a_namespace_in_use_is_not_pushed_out_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvframework.storage.namespaces.MAX_NAMESPACES", 8)
    with serving() as running, WireClient(running.endpoint) as client, WireClient(running.endpoint) as flood:
        key = key_for(client.register(), TOKENS)
        assert client.store(key, b"here")
        for number in range(20):
            flood.register(7, model_name=f"model {number}")
            flood.call("UNREGISTER_KV_CACHE", m.Unregister(7))
        assert client.lookup(key).hit_tokens == len(TOKENS)


def test_instances_are_bounded_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvframework.service.registration.MAX_INSTANCES_IN_ALL", 3)
    with serving() as running, WireClient(running.endpoint) as one, WireClient(running.endpoint) as other:
        for number in range(3):
            one.register(number)
        with pytest.raises(errors.AlreadyRegistered, match="3 instances"):
            other.register(9)
        one.call("UNREGISTER_KV_CACHE", m.Unregister(0))
        other.register(9)


def test_half_of_the_sessions_are_for_local_clients() -> None:
    table = SessionTable(lambda: 0.0, max_sessions=8)
    hello = m.Hello("c", 1)
    remote = [table.open(b"r%d" % number, hello, remote=True) for number in range(4)]
    with pytest.raises(errors.ServerFull, match="4 client sessions are open over TCP"):
        table.open(b"r4", hello, remote=True)
    for number in range(4):
        table.open(b"l%d" % number, hello)
    with pytest.raises(errors.ServerFull, match="8 client sessions are open"):
        table.open(b"l4", hello)
    table.end(remote[0])
    table.open(b"r5", hello, remote=True)


BIG = 15 << 20


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("COMMIT_STORE", m.LeaseRef("x" * BIG)),
        ("FREE_LOOKUP_LOCKS", m.TicketRef("\x1b" * BIG)),
        ("GET_CHUNK_SIZE", m.GetChunkSize(bytes(BIG))),
        (
            "REGISTER_KV_CACHE",
            m.RegisterKvCache(
                9, "m", 1, 0, bytes(16), "x" * BIG, KVLayout("paged", (LayerGroup(1, 16, 1, 8, "int8"),))
            ),
        ),
        ("PREPARE_STORE", "namespace"),
        ("PREPARE_STORE", "model_name"),
        ("RETRIEVE_CPU_CHUNKS", "objects"),
        ("STORE_CPU_CHUNKS", "objects"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_repeats_no_more_than_a_few_words(client: WireClient, name: str, payload: Any) -> None:
    if payload in ("namespace", "model_name"):
        value: Any = bytes(BIG) if payload == "namespace" else "m" * BIG
        payload = m.Prepare(key_for(client.register(), TOKENS, **{payload: value}), 1)
    elif payload == "objects":
        key = key_for(client.register(), TOKENS)
        client.store(key, b"x")
        lease = client.prepare_retrieve(key).lease
        packed = bytes(BIG)
        payload = m.RetrieveCpuChunks(lease, packed) if name.startswith("RETR") else m.StoreCpuChunks(key, 1, packed)
    with pytest.raises(errors.KVFrameworkError) as caught:
        client.call(name, payload)
    error = caught.value
    assert max(map(len, (error.fact, error.available, error.where, error.hint))) <= MAX_ERROR_TEXT + 4
    if name == "PREPARE_STORE":
        assert len(error.fact) < 100, "only how long it is"
    assert error.code not in ("run.handler", "remote"), "it was foreseen"


def test_counts_that_cannot_be_are_not_repeated(client: WireClient) -> None:
    key = key_for(client.register(), TOKENS)
    for first_chunks in ((0, 0), (0,) * 64, (-1,), (1,)):
        with pytest.raises(errors.BadRange):
            client.call("PREPARE_STORE", m.Prepare(key, 1, first_chunks))


def test_a_layout_is_kept_and_therefore_bounded(client: WireClient) -> None:
    def register(layout: KVLayout) -> None:
        client.call("REGISTER_KV_CACHE", m.RegisterKvCache(9, "m", 1, 0, bytes(16), "cpu_gather", layout))

    names = tuple("n" * 600 for _ in range(2000))
    with pytest.raises(errors.MessageTooLarge, match="names are too long"):
        register(KVLayout("paged", (LayerGroup(2000, 16, 1, 8, "float32", layer_names=names),)))


def test_block_sizes_without_a_common_multiple_are_refused(client: WireClient) -> None:
    """Those of states leave objects small, whatever a chunk is."""
    primes = [16_777_213, 16_777_199, 16_777_183, 16_777_153]
    with pytest.raises(errors.BadLayout, match="the smallest chunk of whole blocks of"):
        chunk_tokens_for(primes, 256)
    groups = tuple(LayerGroup(1, block, 1, 8, "float32", state=True) for block in primes)
    with pytest.raises(errors.BadLayout):
        client.call(
            "REGISTER_KV_CACHE", m.RegisterKvCache(9, "m", 1, 0, bytes(16), "cpu_gather", KVLayout("paged", groups))
        )
