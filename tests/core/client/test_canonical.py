"""What a client asks without tensors: the eight-field registration, the chunk of a namespace, a round trip."""

from __future__ import annotations

import pytest

from kvframework import errors
from kvframework.api.keys import CacheKey
from kvframework.client import KVClient, RequestHashes, SchedulerAdapter
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
