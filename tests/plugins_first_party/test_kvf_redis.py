"""The Redis tier against a real redis-server, over TCP, a Unix socket and TLS."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvf_redis import kvf_tiers
from kvf_redis.options import RedisOptions
from kvf_redis.tier import DRAIN_BYTES
from kvframework.api import Outcome, Tier, TierContext
from kvframework.errors import TierError
from kvframework.testing.tier import TierConformance
from tests.redis_server import RedisServer
from tests.tls_proxy import TlsProxy
from tests.waiting import wait_until

pytestmark = pytest.mark.redis

FOUND, MISSING, STORED, FAILED = Outcome.FOUND, Outcome.MISSING, Outcome.STORED, Outcome.FAILED


def open_tier(url: str, **options: object) -> Tier:
    (provider,) = kvf_tiers()
    assert provider.probe() is None
    return provider.create(msgspec.convert({"url": url, **options}, RedisOptions), TierContext(where="[[l2]] 1"))


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def put(tier: Tier, key: bytes, value: bytes, deadline: float | None = None) -> Outcome:
    return tier.put([key], [[memoryview(value)]], deadline=deadline or soon())[0]


def get(tier: Tier, *keys: bytes, nbytes: int, deadline: float | None = None) -> tuple[list[Outcome], list[bytes]]:
    buffers = [bytearray(nbytes) for _ in keys]
    outcomes = tier.get_into(keys, [[memoryview(buffer)] for buffer in buffers], deadline=deadline or soon())
    return outcomes, [bytes(buffer) for buffer in buffers]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def unix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), unix=True) as server:
        yield server


@pytest.fixture(scope="module")
def proxy(shared: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsProxy]:
    with TlsProxy(tmp_path_factory.mktemp("tls"), shared.port) as proxy:
        yield proxy


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


@pytest.fixture
def tier(server: RedisServer) -> Iterator[Tier]:
    tier = open_tier(server.url)
    yield tier
    tier.close()


class TestOverTcp(TierConformance):
    @pytest.fixture
    def tier(self, shared: RedisServer) -> Iterator[Tier]:
        tier = open_tier(shared.url)
        yield tier
        tier.close()


class TestOverUnixSocket(TierConformance):
    @pytest.fixture
    def tier(self, unix: RedisServer) -> Iterator[Tier]:
        tier = open_tier(unix.url, ttl_s=100, connections=1)
        yield tier
        tier.close()


class TestOverTls(TierConformance):
    @pytest.fixture
    def tier(self, proxy: TlsProxy) -> Iterator[Tier]:
        tier = open_tier(f"rediss://localhost:{proxy.port}/0?ssl_ca_certs={proxy.certificate}")
        yield tier
        tier.close()

    def test_an_unknown_certificate_is_refused(self, proxy: TlsProxy) -> None:
        tier = open_tier(f"rediss://localhost:{proxy.port}/0")
        with pytest.raises(TierError, match="cannot connect"):
            tier.ping(deadline=soon())
        tier.close()


def test_parts_of_other_items_and_shapes_are_their_bytes(shared: RedisServer) -> None:
    tier, value, out = open_tier(shared.url), os.urandom(64), bytearray(64)
    assert tier.put([b"shape"], [[memoryview(value).cast("d", (2, 4))]], deadline=soon()) == [STORED]
    assert tier.get_into([b"shape"], [[memoryview(out).cast("I")]], deadline=soon()) == [FOUND]
    assert out == value
    tier.close()


# The server comes and goes


def test_a_killed_server_fails_fast_and_heals_by_itself(server: RedisServer, tier: Tier) -> None:
    assert put(tier, b"key", b"value") is STORED
    server.kill9()
    started = time.monotonic()
    for _ in range(3):
        with pytest.raises(TierError):
            tier.contains([b"key"], deadline=soon())
    assert time.monotonic() - started < 2.0
    server.start()
    assert tier.contains([b"key"], deadline=soon()) == [MISSING]
    assert put(tier, b"key", b"again") is STORED


def test_a_restart_between_two_calls_is_not_noticed(server: RedisServer, tier: Tier) -> None:
    assert put(tier, b"key", b"value") is STORED
    server.restart()
    assert put(tier, b"key", b"value") is STORED


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
    thread.join(5.0)
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
        assert 0.25 < time.monotonic() - started < 2.0
    server.sigcont()
    if connected:
        # the late reply to the first get must not be taken for the answer to this one
        assert get(tier, b"two", nbytes=1000) == ([FOUND], [b"2" * 1000])
    assert put(tier, b"four", b"4") is STORED


def test_a_late_reply_is_never_taken_for_the_next_one(server: RedisServer) -> None:
    tier = open_tier(server.url, connections=1)
    assert put(tier, b"one", b"1" * 1000) is STORED
    assert put(tier, b"two", b"2" * 1000) is STORED
    server.sigstop()
    with pytest.raises(TierError, match="deadline"):
        get(tier, b"one", nbytes=1000, deadline=soon(0.1))
    found: list[tuple[list[Outcome], list[bytes]]] = []
    thread = threading.Thread(target=lambda: found.append(get(tier, b"two", nbytes=1000)))
    thread.start()
    thread.join(0.1)  # it asks while the first answer has not come yet
    server.sigcont()
    thread.join(5.0)
    assert found == [([FOUND], [b"2" * 1000])]
    tier.close()


def test_close_ends_a_call_in_flight(server: RedisServer, tier: Tier) -> None:
    tier.ping(deadline=soon())
    server.sigstop()
    errors: list[str] = []

    def ask() -> None:
        try:
            tier.contains([b"key"], deadline=soon(30))
        except TierError as error:
            errors.append(error.fact)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    tier.close()
    thread.join(5.0)
    assert not thread.is_alive()
    assert errors == ["the tier is closed"]


def test_a_busy_pool_waits_no_longer_than_the_deadline(server: RedisServer) -> None:
    tier = open_tier(server.url, connections=1)
    tier.ping(deadline=soon())
    server.sigstop()
    outcomes: list[list[Outcome]] = []
    thread = threading.Thread(target=lambda: outcomes.append(tier.contains([b"key"], deadline=soon(30))))
    thread.start()
    thread.join(0.2)
    with pytest.raises(TierError, match="before a connection was free"):
        tier.contains([b"key"], deadline=soon(0.2))
    server.sigcont()
    assert tier.contains([b"key"], deadline=soon()) == [MISSING]
    thread.join(5.0)
    assert outcomes == [[MISSING]]
    with server.client() as client:
        assert len(client.client_list()) == 2  # the tier's and this one
    tier.close()


# What others do to the keys


def test_foreign_values_fail_their_key_only(shared: RedisServer) -> None:
    tier = open_tier(shared.url, prefix="foreign:")
    with shared.client() as client:
        client.set("foreign:short", b"x")
        client.set("foreign:long", b"x" * 5000)
        client.set("foreign:empty", b"")
        client.lpush("foreign:list", b"x" * 100)
        client.set("foreign:good", b"g" * 100)
        keys = [b"short", b"good", b"list", b"long", b"nothing", b"empty", b"good"]
        outcomes, values = get(tier, *keys, nbytes=100)
        assert outcomes == [FAILED, FOUND, FAILED, FAILED, MISSING, FAILED, FOUND]
        assert values[1] == values[6] == b"g" * 100
        assert put(tier, b"list", b"v" * 100) is STORED
        assert get(tier, b"list", nbytes=100) == ([FOUND], [b"v" * 100])
        assert len(client.client_list(_type="normal")) >= 2
    tier.close()


def test_a_value_too_long_to_read_past_fails_the_rest_and_the_next_call_works(shared: RedisServer) -> None:
    tier = open_tier(shared.url, prefix="huge:", connections=1)
    with shared.client() as client:
        client.set("huge:good", b"g" * 100)
        client.set("huge:bad", b"b" * (DRAIN_BYTES + 1))
        outcomes, values = get(tier, b"good", b"bad", b"good", nbytes=100)
        assert outcomes == [FOUND, FAILED, FAILED]
        assert values[0] == b"g" * 100
        assert get(tier, b"good", nbytes=100) == ([FOUND], [b"g" * 100])
        client.delete("huge:bad")
    tier.close()


def test_a_full_server_fails_the_key_and_still_answers(server: RedisServer, tier: Tier) -> None:
    assert put(tier, b"before", b"value") is STORED
    with server.client() as client:
        client.config_set("maxmemory", "1")
        assert put(tier, b"key", b"value") is FAILED
        assert get(tier, b"before", nbytes=5) == ([FOUND], [b"value"])
        client.config_set("maxmemory", "0")
    assert put(tier, b"key", b"value") is STORED


def test_prefix_and_ttl_are_seen_from_outside(shared: RedisServer) -> None:
    key = bytes(range(72))
    with shared.client() as client:
        for options, name in (({}, b"kvf:" + key), ({"prefix": "grün/", "ttl_s": 500}, "grün/".encode() + key)):
            tier = open_tier(shared.url, **options)
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


def test_database_of_the_url_is_used(shared: RedisServer) -> None:
    tier = open_tier(shared.url.replace("/0", "/3"))
    assert put(tier, b"in three", b"value") is STORED
    with shared.client() as client:
        assert client.exists(b"kvf:in three") == 0
        client.select(3)
        assert client.exists(b"kvf:in three") == 1
    tier.close()


def test_closing_leaves_no_connection(server: RedisServer) -> None:
    tier = open_tier(server.url)
    tier.ping(deadline=soon())
    with server.client() as client:
        assert len(client.client_list()) == 2
        tier.close()
        wait_until(lambda: len(client.client_list()) == 1)
