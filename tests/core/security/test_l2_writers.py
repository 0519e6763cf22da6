"""Who may write to L2 can make the server load what they like (a checksum is no signature), but not take it down."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvf_redis.commands import MAX_PIECES, Trailer
from kvframework.api.tier import Outcome, Tier
from tests.support.redis_server import RedisServer
from tests.support.redis_tier import get, open_redis_tier, put, soon

pytestmark = pytest.mark.redis

MANY = 64  # more pieces together than a server would want to name
NBYTES = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def tier(server: RedisServer) -> Iterator[Tier]:
    opened = open_redis_tier(server.url, ttl_s=500)
    yield opened
    opened.close()


def forged(count: int = MAX_PIECES, first: int = 1) -> bytes:
    """A first piece that promises many others."""
    return bytes(first) + Trailer(os.urandom(16), count * first, count).bytes_of(0)


@pytest.mark.parametrize("call", ["delete", "touch", "put"])
def test_promised_pieces_are_looked_for_a_few_at_a_time(server: RedisServer, tier: Tier, call: str) -> None:
    keys = [os.urandom(72) for _ in range(MANY)]
    with server.client() as client:
        for key in keys:
            client.set(b"kvf:" + key, forged())
    tracemalloc.start()
    try:
        if call == "put":
            tier.put(keys, [[memoryview(b"x" * 100)] for _ in keys], deadline=soon(2))
        else:
            getattr(tier, call)(keys, deadline=soon(2))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 64 << 20, "all of them would be half a gigabyte"
    key = os.urandom(72)
    assert put(tier, key, b"on") is Outcome.STORED, "the tier goes on"


def test_pieces_that_no_writer_makes_are_not_asked_for(server: RedisServer, tier: Tier) -> None:
    key = os.urandom(72)
    with server.client() as client:
        client.set(b"kvf:" + key, forged(count=MAX_PIECES // 2, first=8))
        client.config_resetstat()
        assert get(tier, key, nbytes=NBYTES)[0] == [Outcome.DAMAGED]
        assert client.info("commandstats")["cmdstat_get"]["calls"] == 1


def test_a_fan_out_folder_may_be_anything(tmp_path: Path) -> None:
    """Names are the server's own; what stands in their place is not followed out of the folder."""
    from kvf_filesystem import FilesystemOptions
    from kvf_filesystem.tier import open_tier

    tier = open_tier(FilesystemOptions(path=str(tmp_path / "tier")), where="[[l2]] #1")
    try:
        key = os.urandom(71) + b"\xab"
        assert put(tier, key, b"value") is Outcome.STORED
        file = tmp_path / "tier" / "ab" / key.hex()
        outside = tmp_path / "outside"
        outside.write_bytes(file.read_bytes())
        file.unlink()
        file.symlink_to(outside)
        assert get(tier, key, nbytes=5)[0] == [Outcome.DAMAGED], "a link is not followed"
        assert tier.delete([key], deadline=soon()) == [Outcome.DELETED]
        assert outside.exists()
        for bad in (b"../../../etc/passwd", b"", key[:-1], key + b"/.."):
            with pytest.raises(ValueError, match="an object key has 72 bytes"):
                tier.contains([bad], deadline=soon())
    finally:
        tier.close()
