"""The server with a real Redis behind it: restarts keep what was stored, a broken Redis harms nobody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvframework.wire import messages as m
from tests.support.redis_server import RedisServer
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

pytestmark = pytest.mark.redis
TOKENS = list(range(2048))


@pytest.fixture
def server(redis: RedisServer) -> Iterator[ServerProcess]:
    with ServerProcess("l2.0.use=redis", f"l2.0.url={redis.url}", "l2.0.timeout_s=60.0") as process:
        yield process


def command(redis: RedisServer, *words: str | bytes) -> object:
    with redis.client() as client:
        return client.execute_command(*words)


def written(client: WireClient) -> bool:
    return bool(client.status()["l2"][0]["write_pending"] == 0)


def store(server: ServerProcess) -> m.Registered:
    with server.client() as client:
        registered = client.register()
        client.store(key_for(registered, TOKENS), b"kept on restart!")
        wait_until(lambda: written(client), what="the write to L2")
    return registered


def test_a_hole_in_redis_ends_the_hit_there(server: ServerProcess, redis: RedisServer) -> None:
    registered = store(server)
    keys = command(redis, "KEYS", "*")
    assert isinstance(keys, list)
    assert len(keys) == 9, "eight objects and one namespace record"
    with server.client() as client:
        client.call("CLEAR", m.Clear())
        tokens_key = key_for(registered, TOKENS)
        victim = _redis_key_of(keys, tokens_key, chunk=5)
        command(redis, "DEL", victim)
        reply = client.settled(client.lookup(tokens_key))
        assert reply.hit_tokens == 5 * 256
        assert client.status()["l1"]["objects"] == 5, "what lies behind the hole was not loaded"


def test_an_idle_server_knows_that_its_tier_has_gone(server: ServerProcess, redis: RedisServer) -> None:
    with server.client() as client:
        redis.kill9()
        wait_until(lambda: client.status()["l2"][0].get("errors", 0) >= 1, what="a check that fails")


def test_clear_with_l2_forgets_everywhere(server: ServerProcess, redis: RedisServer) -> None:
    registered = store(server)
    with server.client() as client:
        assert client.call("CLEAR", m.Clear(l2=True)).objects == 8
        assert client.hit(key_for(registered, TOKENS)) == 0


def _redis_key_of(keys: list[object], key: object, chunk: int) -> bytes:
    from kvf_hashers.sha256 import Sha256

    tokens = key.tokens  # type: ignore[attr-defined]
    digest = Sha256().chunk_digests(tokens, 256)[chunk * 32 : chunk * 32 + 32]
    (found,) = [each for each in keys if isinstance(each, bytes) and each.endswith(digest)]
    return found
