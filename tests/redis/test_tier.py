"""The Redis tier against a real redis-server, over TCP, a Unix socket and TLS."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvf_dev.testing import FaultProxy
from kvf_dev.testing.tier import TierConformance
from kvf_dev.testing.tier.concurrency import DeadlineTests
from kvf_dev.testing.tier.contract import BatchTests, ContractTests
from kvf_redis.commands import DRAIN_BYTES, Command
from kvf_redis.tier import RedisTier
from kvframework.api.tier import Outcome, Tier, TierEntry
from kvframework.errors import TierError
from tests.support.redis_server import RedisServer
from tests.support.redis_tier import Opened, get, open_redis_tier, put, soon
from tests.support.tls_proxy import TlsProxy
from tests.support.waiting import wait_until

pytestmark = pytest.mark.redis

FOUND, MISSING, STORED = Outcome.FOUND, Outcome.MISSING, Outcome.STORED
FAILED, DAMAGED = Outcome.FAILED, Outcome.DAMAGED


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def unix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), unix=True) as server:
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


@pytest.fixture
def tier(server: RedisServer) -> Iterator[Tier]:
    tier = open_redis_tier(server.url)
    yield tier
    tier.close()


class TestOverTcp(TierConformance):
    use = "redis"
    ttl_options = {"ttl_s": 1}  # noqa: RUF012

    @pytest.fixture
    def tier_options(self, shared: RedisServer) -> Mapping[str, object]:
        return {"url": shared.url}

    @pytest.fixture
    def faulty_tier(self, shared: RedisServer) -> Iterator[tuple[Tier, FaultProxy]]:
        with FaultProxy(("127.0.0.1", shared.port)) as proxy:
            host, port = proxy.address
            tier = open_redis_tier(f"redis://{host}:{port}/0")
            yield tier, proxy
            tier.close()


class TestOverUnixSocket(ContractTests, BatchTests):
    """What depends on the socket: the bytes. `TestOverTcp` runs the whole kit."""

    use = "redis"

    @pytest.fixture
    def tier_options(self, unix: RedisServer) -> Mapping[str, object]:
        return {"url": unix.url, "ttl_s": 100, "connections": 1}


@pytest.fixture(scope="module")
def proxy(shared: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsProxy]:
    with TlsProxy(tmp_path_factory.mktemp("tls"), shared.port) as proxy:
        yield proxy


class TestOverTls(ContractTests, BatchTests, DeadlineTests):
    """What depends on the socket: the bytes, and how a wait for them ends."""

    use = "redis"

    @pytest.fixture
    def tier_options(self, proxy: TlsProxy) -> Mapping[str, object]:
        return {"url": f"rediss://localhost:{proxy.port}/0", "tls_ca": str(proxy.certificate)}

    def test_an_unknown_certificate_is_refused(self, proxy: TlsProxy) -> None:
        tier = open_redis_tier(f"rediss://localhost:{proxy.port}/0")
        with pytest.raises(TierError, match="cannot connect"):
            tier.ping(deadline=soon())
        tier.close()


def test_a_certificate_for_another_host_is_refused(shared: RedisServer, opened: Opened, tmp_path: Path) -> None:
    with TlsProxy(tmp_path, shared.port, names="DNS:elsewhere") as proxy:
        url = f"rediss://localhost:{proxy.port}/0"
        with pytest.raises(TierError, match="cannot connect"):
            opened(url, tls_ca=str(proxy.certificate)).ping(deadline=soon())
        opened(f"{url}?ssl_check_hostname=false", tls_ca=str(proxy.certificate)).ping(deadline=soon())
        opened(f"{url}?ssl_cert_reqs=none").ping(deadline=soon())


def test_parts_of_other_items_and_shapes_are_their_bytes(shared: RedisServer) -> None:
    tier, value, out = open_redis_tier(shared.url), os.urandom(64), bytearray(64)
    assert tier.put([b"shape"], [[memoryview(value).cast("d", (2, 4))]], deadline=soon()) == [STORED]
    assert tier.get_into([b"shape"], [[memoryview(out).cast("I")]], deadline=soon()) == [len(out)]
    assert out == value
    tier.close()


# The server comes and goes


def test_a_killed_server_fails_fast_and_heals_by_itself(server: RedisServer, tier: Tier) -> None:
    assert put(tier, b"key", b"value") is STORED
    server.kill9()
    started = time.monotonic()
    for _ in range(3):
        with pytest.raises(TierError):
            tier.contains([b"key"], deadline=soon(60))
    assert time.monotonic() - started < 20.0
    server.start()
    assert tier.contains([b"key"], deadline=soon()) == [MISSING]
    assert put(tier, b"key", b"again") is STORED


def test_a_kill_in_the_middle_of_a_call_fails_it_at_once(server: RedisServer, tier: Tier) -> None:
    tier.ping(deadline=soon())
    server.sigstop()
    errors: list[TierError] = []
    value, sizes = bytearray(64 << 20), []

    def store() -> None:
        with memoryview(value) as view:
            try:
                tier.put([b"a", b"b"], [[view], [view]], deadline=soon(30))
            except TierError as error:
                errors.append(error)
        sizes.append(len(value))

    thread = threading.Thread(target=store)
    thread.start()
    thread.join(0.2)  # the frozen server takes in less than is sent, so the call is under way
    assert thread.is_alive()
    server.kill9()
    thread.join(60)
    assert not thread.is_alive()
    assert len(errors) == 1
    value.clear()  # the error keeps no view of the buffer
    server.start()
    assert put(tier, b"a", b"value") is STORED


@pytest.mark.parametrize("connected", [True, False])
def test_a_frozen_server_costs_no_more_than_the_deadline(server: RedisServer, tier: Tier, connected: bool) -> None:
    if connected:
        assert put(tier, b"one", b"1" * 1000) is STORED
        assert put(tier, b"two", b"2" * 1000) is STORED
    server.sigstop()
    for call in (
        lambda: tier.contains([b"one"], deadline=soon(0.3)),
        lambda: get(tier, b"one", nbytes=1000, deadline=soon(0.3)),
        lambda: put(tier, b"three", b"3" * (16 << 20), deadline=soon(0.3)),
        lambda: tier.ping(deadline=soon(0.3)),
    ):
        started = time.monotonic()
        with pytest.raises(TierError, match="deadline"):
            call()
        assert 0.25 < time.monotonic() - started < 20.0
    server.sigcont()
    if connected:
        # the late reply to the first get must not be taken for the answer to this one
        assert get(tier, b"two", nbytes=1000) == ([FOUND], [b"2" * 1000])
    assert put(tier, b"four", b"4") is STORED


def test_a_busy_pool_waits_no_longer_than_the_deadline(server: RedisServer) -> None:
    tier = open_redis_tier(server.url, connections=1)
    tier.ping(deadline=soon())
    server.sigstop()
    outcomes: list[list[Outcome]] = []
    thread = threading.Thread(target=lambda: outcomes.append(tier.contains([b"key"], deadline=soon(30))))
    thread.start()

    def is_busy() -> bool:
        with pytest.raises(TierError) as caught:
            tier.contains([b"key"], deadline=soon(0.2))
        return "before a connection was free" in caught.value.fact

    wait_until(is_busy, what="the other call to have the only connection")
    server.sigcont()
    assert tier.contains([b"key"], deadline=soon()) == [MISSING]
    thread.join(60)
    assert outcomes == [[MISSING]]
    with server.client() as client:
        assert len(client.client_list()) == 2  # the tier's and this one
    tier.close()


# What others do to the keys


@pytest.mark.parametrize(("local", "at_once"), [(True, 1), (False, 3)])
def test_loads_of_a_local_server_take_turns(
    shared: RedisServer, unix: RedisServer, opened: Opened, local: bool, at_once: int
) -> None:
    tier = opened(unix.url if local else shared.url)
    assert isinstance(tier, RedisTier)
    assert put(tier, b"key", b"value") == STORED
    honest, begun, go_on = tier._router.run, threading.Semaphore(0), threading.Semaphore(0)

    def in_steps(commands: Sequence[Command], deadline: float) -> None:
        begun.release()
        assert go_on.acquire(timeout=60)
        honest(commands, deadline)

    tier._router.run = in_steps  # type: ignore[method-assign]
    rooms = [bytearray(5) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        loads = [pool.submit(tier.get_into, [b"key"], [[memoryview(room)]], deadline=soon(60)) for room in rooms]
        assert all(begun.acquire(timeout=60) for _ in range(at_once))
        if local:
            with pytest.raises(TierError, match="other loads"):
                tier.get_into([b"key"], [[memoryview(bytearray(5))]], deadline=soon(0.05))
        go_on.release(3)
        assert [load.result(60) for load in loads] == [[5]] * 3
    assert rooms == [b"value"] * 3


def test_foreign_values_are_that_keys_matter_only(shared: RedisServer, opened: Opened) -> None:
    tier = opened(shared.url, prefix="foreign:")
    with shared.client() as client:
        client.set("foreign:garbage", b"\r\n$-1\r\n" * 10)
        client.set("foreign:truncated", b"g" * 60)
        client.set("foreign:long", b"x" * 5000)
        client.set("foreign:one too many", b"x" * 101)
        client.set("foreign:empty", b"")
        client.lpush("foreign:list", b"x" * 100)
        client.hset("foreign:hash", b"x", b"x" * 100)
        client.set("foreign:good", b"g" * 100)
        client.set("foreign:flipped", b"g" * 100)
        client.setbit("foreign:flipped", 500, 1 - client.getbit("foreign:flipped", 500))
        expected = {
            b"garbage": FOUND,  # whether it is right, the core's checksum says
            b"good": FOUND,
            b"list": DAMAGED,
            b"truncated": FOUND,
            b"long": DAMAGED,
            b"one too many": DAMAGED,
            b"nothing": MISSING,
            b"hash": DAMAGED,
            b"empty": FOUND,
            b"flipped": FOUND,
        }
        outcomes, values = get(tier, *expected, nbytes=100)
        assert dict(zip(expected, outcomes, strict=True)) == expected
        assert values[0][:80] == b"\r\n$-1\r\n" * 10 + bytes(10)
        assert values[1] == b"g" * 100
        assert values[3][:60] == b"g" * 60
        assert sum(one != other for one, other in zip(values[9], b"g" * 100, strict=True)) == 1
        assert tier.contains([b"list"], deadline=soon()) == [FOUND]
        assert tier.delete([b"list", b"hash"], deadline=soon()) == [Outcome.DELETED] * 2
        client.lpush("foreign:list", b"x" * 100)
        assert put(tier, b"list", b"v" * 100) is STORED
        assert get(tier, b"list", nbytes=100) == ([FOUND], [b"v" * 100])
        assert len(client.client_list(_type="normal")) >= 2


def test_a_value_too_long_to_read_past_costs_a_connection_and_no_other_key(shared: RedisServer, opened: Opened) -> None:
    tier = opened(shared.url, prefix="huge:", connections=1)
    with shared.client() as client:
        client.set("huge:good", b"g" * 100)
        client.set("huge:bad", b"b" * (DRAIN_BYTES + 1))
        before = client.info()["total_connections_received"]
        outcomes, values = get(tier, b"good", b"bad", b"good", b"bad", nbytes=100)
        assert outcomes == [FOUND, DAMAGED, FOUND, DAMAGED]
        assert values[0] == values[2] == b"g" * 100
        assert get(tier, b"good", nbytes=100) == ([FOUND], [b"g" * 100])
        assert client.info()["total_connections_received"] == before + 3
        client.delete("huge:bad")


def test_prefix_and_ttl_are_seen_from_outside(shared: RedisServer) -> None:
    key = bytes(range(72))
    with shared.client() as client:
        for options, name in (({}, b"kvf:" + key), ({"prefix": "grün/", "ttl_s": 500}, "grün/".encode() + key)):
            tier = open_redis_tier(shared.url, **options)
            assert put(tier, key, b"value") is STORED
            assert client.get(name) == b"value"
            if options:
                assert 400 < client.ttl(name) <= 500
                client.expire(name, 5)
                tier.touch([key, b"unknown"], deadline=soon())
                assert 400 < client.ttl(name) <= 500
            else:
                tier.touch([key], deadline=soon())
                assert client.ttl(name) == -1
            tier.close()


def test_the_listing_has_this_prefix_only_as_it_stands(shared: RedisServer, opened: Opened) -> None:
    """Each prefix as a glob would match keys of another one, or none of its own."""
    key = os.urandom(72)
    prefixes = ["g", "g*", "g?", "g[ab]", "ga", "g\\*", "gg", "", "ü:"]
    tiers = [opened(shared.url.replace("/0", "/3"), prefix=prefix) for prefix in prefixes]
    for number, tier in enumerate(tiers):
        assert put(tier, key, bytes(number)) is STORED
        assert put(tier, key[:40], b"a key of another length") is STORED
    for number, tier in enumerate(tiers):
        assert list(tier.scan(deadline=soon())) == [TierEntry(key, number, None)]
    with shared.client() as client:
        client.select(3)
        client.flushdb()
        client.lpush(b"g" + key, b"another type")
    assert list(tiers[0].scan(deadline=soon())) == []


def test_a_value_that_is_too_long_is_not_stored_and_is_a_problem(server: RedisServer, opened: Opened) -> None:
    tier, longest = opened(server.url, max_value_bytes=64 << 10), b"x" * (64 << 10)
    parts = [[memoryview(longest)], [memoryview(longest), memoryview(b"x")]]
    assert tier.put([b"longest", b"longer"], parts, deadline=soon()) == [STORED, FAILED]
    assert ["max_value_bytes" in each for each in tier.problems()] == [True]
    assert tier.contains([b"longest", b"longer"], deadline=soon()) == [FOUND, MISSING]
    assert put(tier, b"short", b"x") is STORED
    assert tier.problems() == []


def test_a_full_server_is_a_problem_until_it_stores_again(server: RedisServer, opened: Opened) -> None:
    tier = opened(server.url)
    with server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", client.info("memory")["used_memory"] + (1 << 20))
        assert put(tier, b"large", b"x" * (8 << 20)) is FAILED
        assert ["full" in each for each in tier.problems()] == [True]
        client.config_set("maxmemory", 0)
    assert put(tier, b"large", b"x") is STORED
    assert tier.problems() == []
