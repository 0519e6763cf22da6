"""A folder before a Redis: what Redis had is written to the folder, and is there without Redis and after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvf_filesystem.form import HEAD_BYTES, path_of
from kvframework.storage.namespaces import HEADER_BYTES
from tests.core.tiers.engine import OBJECT_BYTES, Engine
from tests.core.tiers.nodes import await_count, await_rest, await_state, await_written, count, tier
from tests.core.tiers.prompts import object_key, prompt
from tests.support.redis_server import RedisServer
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.redis


def test_what_redis_had_is_promoted_to_disk_and_survives_both(redis: RedisServer, tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    folder = tmp_path / "kv"
    packed = ("use=redis", f"url={redis.url}", "codec=zstd", "timeout_s=1")
    disk = ("l2.0.use=filesystem", f"l2.0.path={folder}", *(f"l2.1.{each}" for each in packed))
    own, other, late, last = (prompt(range(first, first + 8)) for first in (0, 100, 200, 300))

    with ServerProcess(*(f"l2.0.{each}" for each in packed)) as far, Engine(far.endpoint) as engine:
        for each in (own, other):
            engine.store(each)
        await_written(engine.client)
        keys = [object_key(engine.namespace, digest) for digest in own.digests]
    with redis.client() as client:
        assert max(client.strlen(b"kvf:" + key) for key in keys) < OBJECT_BYTES / 2

    with ServerProcess(*disk) as near:
        with Engine(near.endpoint) as engine:
            assert engine.load(own) == len(own)
            assert count(engine.client, "hits", 1) == len(own)
            await_count(engine.client, "stored", len(own) + 1)
            assert (tier(engine.client)["codec"], tier(engine.client, 1)["codec"]) == ("none", "zstd")
            assert [(folder / path_of(key)).stat().st_size for key in keys] == [
                HEAD_BYTES + HEADER_BYTES + OBJECT_BYTES
            ] * len(keys)
            assert count(engine.client, "stored", 1) == 0, "what came from there is not written there again"
            engine.clear()
            assert engine.load(own) == len(own)
            assert count(engine.client, "hits", 1) == len(own), "the nearer one is asked first"
            engine.store(late)
            await_count(engine.client, "stored", 2 * len(own) + 1)
            await_count(engine.client, "stored", len(late) + 1, 1)

        redis.kill9()
        near.kill9()
        near.start()
        with Engine(near.endpoint) as engine:
            assert [engine.load(each) for each in (own, late)] == [8, 8]
            assert engine.load(other) == 0, "only Redis had it"
            engine.store(other)
            await_written(engine.client)
            await_state(engine.client, "down", 1)
            assert tier(engine.client)["state"] == "closed"
            engine.clear()
            assert [engine.load(each) for each in (own, late, other)] == [8, 8, 8]
            # Those of `other` may have been lost to Redis, as L1 did not have them when it was tried again.
            engine.store(last)
            redis.restart()
            await_state(engine.client, "closed", 1)
            await_written(engine.client, 1)
            with redis.client() as client:
                names = [b"kvf:" + object_key(engine.namespace, digest) for digest in last.digests]
                assert client.exists(*names) == len(last), "it waited until Redis came back"
            await_rest(engine.client)


def test_what_the_folder_lost_is_had_from_redis(redis: RedisServer, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    settings = ("l2.0.use=filesystem", f"l2.0.path={folder}", "l2.1.use=redis", f"l2.1.url={redis.url}")
    own = prompt(range(8))
    with ServerProcess(*settings) as server, Engine(server.endpoint) as engine:
        engine.store(own)
        for index in (0, 1):
            await_written(engine.client, index)
        keys = [object_key(engine.namespace, digest) for digest in own.digests]
        (folder / path_of(keys[2])).unlink()
        garbled = folder / path_of(keys[5])
        garbled.write_bytes(bytes(garbled.stat().st_size))
        engine.clear()
        engine.store(prompt([1000]))
        assert engine.load(own) == len(own)
        assert (count(engine.client, "corrupt"), count(engine.client, "corrupt", 1)) == (1, 0)
        await_written(engine.client)
        with redis.client() as client:
            client.flushall()
        engine.clear()
        assert engine.load(own) == len(own), "the folder was given both again"
