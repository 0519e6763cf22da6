"""The Redis tier as tests use it: made from options, and called with one key or several."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import msgspec

from kvf_redis import RedisOptions, kvf_tiers
from kvf_redis.cluster import slot_of
from kvframework.api.plugin import ByteSize
from kvframework.api.tier import Outcome, TableContext, Tier
from tests.support.received import outcomes_of
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer

WHERE = "[[l2]] #1"

Opened = Callable[..., Tier]


def redis_options(url: str, **options: object) -> RedisOptions:
    return msgspec.convert({"url": url, **options}, RedisOptions, dec_hook=lambda _, value: ByteSize.parse(value))


def open_redis_tier(url: str, **options: object) -> Tier:
    """Make the tier as a server does; it connects on first use."""
    (provider,) = kvf_tiers()
    assert provider.probe() is None
    return provider.create(redis_options(url, **options), TableContext(where=WHERE))


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def put(tier: Tier, key: bytes, value: bytes, deadline: float | None = None) -> Outcome:
    return tier.put([key], [[memoryview(value)]], deadline=deadline or soon())[0]


def get(tier: Tier, *keys: bytes, nbytes: int, deadline: float | None = None) -> tuple[list[Outcome], list[bytes]]:
    """Return the outcomes, and the whole buffers of `nbytes`."""
    buffers = [bytearray(nbytes) for _ in keys]
    outcomes = outcomes_of(
        tier.get_into(keys, [[memoryview(buffer)] for buffer in buffers], deadline=deadline or soon())
    )
    return outcomes, [bytes(buffer) for buffer in buffers]


def key_in(slot: int, serial: int = 0, prefix: bytes = b"kvf:") -> bytes:
    """Return a key whose name in Redis lies in the slot."""
    number = serial << 40
    while slot_of(prefix + b"%d" % number) != slot:
        number += 1
    return b"%d" % number


def keys_of_every_master(cluster: RedisCluster, each: int = 20) -> dict[bytes, RedisServer]:
    """Group keys by the server that serves them."""
    found: dict[bytes, RedisServer] = {}
    left = {server.port: each for server in cluster.running if cluster.is_master(server)}
    masters = {slot: cluster.master_of(slot) for slot in (100, 8000, 16000)}
    while any(left.values()):
        key = os.urandom(72)
        part = slot_of(b"kvf:" + key) * 3 >> 14
        server = list(masters.values())[part]
        if left[server.port]:
            left[server.port] -= 1
            found[key] = server
    return found
