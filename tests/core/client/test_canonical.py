"""What a client asks without tensors: the eight-field registration, the chunk of a namespace, a round trip; and its
first `hello`, which waits for what the client sets up after the handshake."""

from __future__ import annotations

import threading

import pytest

from kvframework import errors
from kvframework.api.keys import CacheKey
from kvframework.client import KVClient, RequestHashes, SchedulerAdapter
from kvframework.wire import messages as m
from tests.core.server.in_process import serving
from tests.support.wire_client import register_tiny


def test_a_canonical_instance_stores_and_a_scheduler_without_a_registration_finds_it(client: KVClient) -> None:
    instance = register_tiny(client, 7, block_size=96)
    assert instance.registration.desc.chunk_tokens == 288
    scheduler = SchedulerAdapter(client, model_name="tiny", namespace=instance.namespace)
    assert scheduler.chunk_tokens == 288
    request = RequestHashes(client.hasher, scheduler.chunk_tokens, request_id="r")
    request.extend(list(range(300)))
    key = CacheKey("tiny", 1, 0, instance.namespace, 0, 288, "r", digests=request.digests(288))
    with client.prepare_store(instance.transfer(key)).result(20) as plan:
        for place in plan.ranges:
            plan.arena[place.offset : place.offset + place.length] = b"x" * place.length
        assert plan.commit().result(20).ok
    found = scheduler.lookup(request)
    assert found.hit_tokens == 288
    scheduler.free(found)


def test_the_chunk_of_a_namespace_that_nobody_registered_is_refused(client: KVClient) -> None:
    with pytest.raises(errors.RequestError, match="not registered"):
        client.chunk_tokens(b"nobody knows it.")


def test_a_ping_tells_how_long_a_round_trip_takes(client: KVClient) -> None:
    assert 0 < client.ping() < 20


def test_the_first_hello_is_there_once_calls_are_possible() -> None:
    shaken, ready = threading.Event(), threading.Event()

    class Slow(KVClient):
        def _up(self, reply: m.HelloReply, arena_fd: int | None) -> None:
            super()._up(reply, arena_fd)
            assert self.hello is reply  # what is set up then needs it
            shaken.set()
            assert ready.wait(60)

    with serving() as server, Slow(server.endpoint, connect_timeout_s=60.0) as client:
        assert shaken.wait(60)
        threading.Timer(0.2, ready.set).start()
        assert client.hello.chunk_size
        client.request("NOOP", m.Empty(), m.Empty)
