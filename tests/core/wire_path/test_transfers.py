"""Engines that cannot map the arena: what one stores over the wire, others load, over the wire or not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvframework.api.transport import StoreOutcome
from kvframework.client import KVClient
from tests.core.wire_path.remote import RemoteServer, clear, held, remote_server
from tests.support.engines import CHUNK, PagedEngine
from tests.support.lazy import torch
from tests.support.waiting import wait_until

pytestmark = pytest.mark.torch


TOKENS = list(range(700))
BLOCKS, OTHERS = list(range(32)), list(range(63, 31, -1))


@pytest.fixture(scope="module", params=[True, False], ids=["curve", "insecure"])
def server(request: pytest.FixtureRequest) -> Iterator[RemoteServer]:
    with remote_server(curve=request.param) as running:
        yield running


@pytest.fixture
def client(server: RemoteServer) -> Iterator[KVClient]:
    clear(server)
    with server.connect() as connected:
        assert connected.wait_up(20)
        yield connected


def test_over_tcp_nothing_is_mapped_and_the_same_bytes_come_back(server: RemoteServer, client: KVClient) -> None:
    assert client.hello.liveness == ""
    assert not client.maps_arena
    first = PagedEngine(client)
    assert first.store(first.request(TOKENS), BLOCKS)
    assert first.last.result() == StoreOutcome(stored=2)
    with server.connect(name="client") as another:
        second = PagedEngine(another, 2)
        result = second.scheduler.lookup(second.request(TOKENS))
        assert result.hit_tokens == 512
        assert second.retrieve(second.request(TOKENS), OTHERS, skip=20)
        assert torch.equal(second.tokens(OTHERS)[:, :, 20:], first.tokens(BLOCKS)[:, :, 20:])
        assert not torch.equal(second.tokens(OTHERS)[:, :, :20], first.tokens(BLOCKS)[:, :, :20])
        second.scheduler.free(result)
    with server.local() as watcher:
        wait_until(lambda: held(watcher) == (0, 0, 0, 0))


def test_wire_and_arena_hold_the_same_objects(server: RemoteServer, client: KVClient) -> None:
    remote = PagedEngine(client)
    assert remote.store(remote.request(TOKENS), BLOCKS)
    with server.process.engine_client() as mapped:
        local = PagedEngine(mapped, 2, path="arena")
        assert local.retrieve(local.request(TOKENS), OTHERS)
        assert torch.equal(local.tokens(OTHERS), remote.tokens(BLOCKS))
        forced = PagedEngine(mapped, 3, path="wire")
        assert forced.retrieve(forced.request(TOKENS), OTHERS)
        assert torch.equal(forced.tokens(OTHERS), remote.tokens(BLOCKS))
        more = list(range(2000, 2256))
        assert local.store(local.request(more), OTHERS[:16])
    assert remote.retrieve(remote.request(more), BLOCKS[:16])
    assert torch.equal(remote.tokens(BLOCKS[:16]), local.tokens(OTHERS[:16]))


def test_only_what_is_missing_travels(server: RemoteServer, client: KVClient) -> None:
    engine = PagedEngine(client)
    assert engine.store(engine.request(TOKENS[:256]), BLOCKS[:16])
    before = engine.tokens(BLOCKS[:16])
    engine.kv["layer0"].add_(1.0)
    assert engine.store(engine.request(TOKENS), BLOCKS)
    assert engine.last.result() == StoreOutcome(stored=1, present=1)
    assert engine.store(engine.request(TOKENS), BLOCKS)
    assert engine.last.result() == StoreOutcome(present=2)
    assert engine.retrieve(engine.request(TOKENS), OTHERS)
    assert torch.equal(engine.tokens(OTHERS[:16]), before)
    assert torch.equal(engine.tokens(OTHERS[16:]), engine.tokens(BLOCKS[16:]))


def test_a_miss_is_false_and_leaves_no_pin(server: RemoteServer, client: KVClient) -> None:
    engine = PagedEngine(client)
    before = engine.tokens(OTHERS)
    assert engine.retrieve(engine.request(TOKENS), OTHERS) is False
    assert torch.equal(engine.tokens(OTHERS), before)
    with server.local() as watcher:
        wait_until(lambda: held(watcher) == (0, 0, 0, 0))


def test_many_batches_and_everything_skipped(client: KVClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvf_cpu_gather.wire_path.BATCH_BYTES", 70_000)
    monkeypatch.setattr("kvf_cpu_gather.wire_path.WINDOW_BYTES", 200_000)
    engine = PagedEngine(client, blocks=512)
    tokens, blocks = list(range(16 * CHUNK)), list(range(256))
    target = list(range(511, 255, -1))
    assert engine.store(engine.request(tokens), blocks)
    assert engine.last.result() == StoreOutcome(stored=16)
    untouched = engine.tokens(target)
    assert engine.retrieve(engine.request(tokens), target, skip=16 * CHUNK)
    assert torch.equal(engine.tokens(target), untouched)
    assert engine.retrieve(engine.request(tokens), target)
    assert torch.equal(engine.tokens(target), engine.tokens(blocks))


def test_a_full_l1_keeps_the_beginning_of_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvf_cpu_gather.wire_path.BATCH_BYTES", 1 << 20)
    with remote_server("server.chunk_size=256", capacity="4MiB") as small, small.connect() as client:
        engine = PagedEngine(client, blocks=160, wide=256)  # 1 MiB an object
        old = engine.request([9] * 512, "old")
        assert engine.store(old, BLOCKS)
        request = engine.request(list(range(10 * CHUNK)))
        assert engine.store(request, list(range(160))) is False
        outcome = engine.last.result()
        assert isinstance(outcome, StoreOutcome)
        assert (outcome.stored, outcome.dropped) == (4, 6)
        assert engine.scheduler.lookup(request).hit_tokens == 4 * CHUNK


def test_a_broken_connection_takes_its_registration_along(server: RemoteServer) -> None:
    """The new session replaces the old one at once, which nobody would hear of over TCP for half a minute."""
    with server.connect() as client:
        engine = PagedEngine(client, 77)
        session = client.hello.session
        client._connection._link.close()  # type: ignore[union-attr]
        wait_until(lambda: client.usable and client.hello.session != session, what="another session")
        assert engine.store(engine.request([7] * 256), BLOCKS[:16])
        with server.local() as watcher:
            assert watcher.status()["non_gpu_instance_ids"] == [77]
