"""Quotas and promises in a real Redis: eight processes that write at once, and restarts of everything."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvframework.api.keys import retain_of, tenant_digest
from kvframework.api.tier import Outcome, Terms
from tests.quota.writers import TENANT, key_of, soon, writing
from tests.support.redis_server import RedisServer
from tests.support.redis_tier import Opened, open_redis_tier, put
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import key_for

pytestmark = pytest.mark.redis

KEEPS = ("--appendonly", "yes", "--maxmemory-policy", "volatile-lru")
MIB = 1 << 20
CHUNK = 256
DAY_S = 86400
SALT = "planted-salt-of-a-customer"


# All at one moment: a listing in several steps counts values that make room for one another twice.
HELD = """
local held = 0
for _, key in ipairs(redis.call('KEYS', 'kvf:*')) do
  if redis.call('TYPE', key).ok == 'string' then held = held + redis.call('STRLEN', key) end
end
return held
"""


def held_bytes(server: RedisServer) -> int:
    with server.client() as client:
        return int(client.eval(HELD, 0))


def test_eight_writers_keep_to_a_quota(tmp_path: Path) -> None:
    most, nbytes = 32 * MIB, 64 << 10
    with RedisServer(tmp_path) as server:
        seen = []
        with writing("redis", {"url": server.url}, most=most, nbytes=nbytes, seconds=8.0) as running:
            while running():
                seen.append(held_bytes(server))
        seen.append(held_bytes(server))
    assert max(seen) <= most * 1.02
    assert min(seen[-3:]) >= most * 0.98, "a full quota is used"


@pytest.fixture
def opened() -> Iterator[Opened]:
    tiers = []

    def opens(url: str, **options: object) -> object:
        tiers.append(open_redis_tier(url, **options))
        return tiers[-1]

    yield opens  # type: ignore[misc]
    for tier in tiers:
        tier.close()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--appendonly", "yes", "--maxmemory-policy", "allkeys-lru"), "maxmemory-policy is allkeys-lru"),
        (("--maxmemory-policy", "noeviction"), "appendonly is off"),
        (("--appendonly", "yes", "--appendfsync", "no"), "appendfsync is no"),
    ],
)
def test_a_redis_that_cannot_keep_a_promise_refuses_by_name(
    tmp_path: Path, opened: Opened, options: tuple[str, ...], why: str
) -> None:
    with RedisServer(tmp_path, options=options) as server:
        tier, key = opened(server.url), key_of(b"salt-of-a-tenant")
        assert tier.admit([Terms(key, TENANT, MIB, 5)], deadline=soon()) == [Outcome.STORED]
        assert put(tier, key, b"value") is Outcome.STORED
        promise = Terms(key, TENANT, MIB, until=time.time() + DAY_S)
        assert tier.admit([promise], deadline=soon()) == [Outcome.FAILED]
        assert why in "\n".join(tier.problems())


def test_a_promised_value_loses_its_ttl_until_the_promise_ends(tmp_path: Path, opened: Opened) -> None:
    with RedisServer(tmp_path, options=KEEPS) as server, server.client() as client:
        tier, key, other = opened(server.url, ttl_s=1000), key_of(b"salt-of-a-tenant"), key_of(b"salt-of-a-tenant")
        for each in (key, other):
            assert tier.admit([Terms(each, TENANT, 25, 10)], deadline=soon()) == [Outcome.STORED]
            assert put(tier, each, b"0123456789") is Outcome.STORED
        assert 0 < client.ttl(b"kvf:" + key) <= 1000
        until = time.time() + 6.0
        assert tier.admit([Terms(key, TENANT, 25, until=until)], deadline=soon()) == [Outcome.STORED]
        assert client.ttl(b"kvf:" + key) == -1
        tier.touch([key, other], deadline=soon())
        assert client.ttl(b"kvf:" + key) == -1, "a use restarts no TTL of a promised value"
        assert tier.admit([Terms(key, TENANT, 25, 10)], deadline=soon()) == [Outcome.STORED]
        assert put(tier, key, b"0123456789") is Outcome.STORED
        assert client.ttl(b"kvf:" + key) == -1, "nor does a second store"
        # The third has room only where the second was: the first is promised.
        third = key_of(b"salt-of-a-tenant")
        assert tier.admit([Terms(third, TENANT, 25, 10)], deadline=soon()) == [Outcome.STORED]
        assert tier.contains([key, other], deadline=soon()) == [Outcome.FOUND, Outcome.MISSING]
        assert tier.admit([Terms(third, TENANT, 25, 20)], deadline=soon()) == [Outcome.FAILED]
        assert tier.admit([Terms(other, TENANT, 25, until=until)], deadline=soon()) == [Outcome.MISSING]

        def ended() -> bool:
            tier.ping(deadline=soon())
            return client.ttl(b"kvf:" + key) > 0

        wait_until(ended, 30, "the end of the promise")
        tier.delete([key], deadline=soon())
        assert client.zcard("kvf:{quota}:kept") == 0


SETTINGS = (
    f'tenants.customer.salts=["{tenant_digest(SALT)}"]',
    "tenants.customer.l2_max=256KiB",
)


def prompt(number: int, chunks: int) -> list[int]:
    return [token for chunk in range(chunks) for token in [1000 * number + chunk] * CHUNK]


def test_kv_that_a_customer_pays_for_is_there_after_every_process_was_killed(tmp_path: Path) -> None:
    """Eight objects of 32 KiB fill the quota; two promised ones outlive sixteen later ones, and kill -9 of all."""
    with (
        RedisServer(tmp_path, options=KEEPS) as redis,
        ServerProcess(*SETTINGS, "l2.0.use=redis", f"l2.0.url={redis.url}", "l2.0.ttl_s=3600") as server,
    ):
        with server.client() as client:
            registered = client.register()
            paid = key_for(registered, prompt(1, 2), cache_salt=SALT, retain=retain_of(DAY_S))
            assert client.store(paid, b"p") is not None
            wait_until(lambda: client.status()["l2"][0]["promised"] == 2, 60, "the promise")
            for number in range(2, 6):
                client.store(key_for(registered, prompt(number, 4), cache_salt=SALT), b"x")
                wait_until(lambda: client.status()["l2"][0]["write_pending"] == 0, 60, "the writes")
            wait_until(
                lambda: client.status()["l2"][0]["details"].get("tenants", {}).get("customer", {}).get("kept") == 2,
                60,
                "the bytes of the tenant",
            )
            assert client.status()["l2"][0]["details"]["tenants"]["customer"]["bytes"] <= 256 << 10
        server.kill9()
        redis.kill9()
        redis.start()
        server.start()
        with server.client() as client:
            registered = client.register()
            paid = key_for(registered, prompt(1, 2), cache_salt=SALT)
            assert client.hit(paid) == 2 * CHUNK
            assert client.retrieve(paid) == b"p" * (2 << 15)
            assert client.hit(key_for(registered, prompt(2, 4), cache_salt=SALT)) == 0
        assert held_bytes(redis) <= 256 << 10
