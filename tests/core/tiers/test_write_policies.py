"""When a real server writes to L2: what is used a second time, and what L1 has no room for."""

from __future__ import annotations

import pytest

from tests.core.tiers.engine import Engine
from tests.core.tiers.nodes import await_rest, await_written, tier
from tests.core.tiers.prompts import object_key, prompt
from tests.support.redis_server import RedisServer
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.redis


def test_write_through_selective_writes_what_is_asked_for_again(redis: RedisServer) -> None:
    settings = ("l2.0.use=redis", f"l2.0.url={redis.url}", "l2.0.write_policy=write_through_selective")
    once, twice, again = (prompt(range(first, first + 8)) for first in (0, 100, 200))
    with ServerProcess(*settings) as server, Engine(server.endpoint) as engine, redis.client() as client:

        def in_redis() -> list[int]:
            """How many chunks of each prompt Redis holds."""
            return [
                sum(client.exists(b"kvf:" + object_key(engine.namespace, digest)) for digest in each.digests)
                for each in (once, twice, again)
            ]

        for each in (once, twice, again):
            engine.store(each)
        # What a store is to write is queued before it is answered.
        assert tier(engine.client)["write_pending"] == 0
        assert engine.load(twice) == len(twice)
        assert engine.store(again).present == len(again)
        await_written(engine.client)
        assert in_redis() == [0, 8, 8]
        assert tier(engine.client)["write_policy"] == "write_through_selective"

        engine.clear()
        assert [engine.load(each) for each in (once, twice, again)] == [0, 8, 8]
        engine.store(once)  # a second time, after L1 had lost it
        await_written(engine.client)
        assert in_redis() == [8, 8, 8]
        await_rest(engine.client)
