"""The Redis tier over TLS as Redis itself speaks it: one server, and a cluster that speaks nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvf_dev.testing.tier import TierConformance
from kvframework.api.tier import Outcome, Tier
from kvframework.errors import TierError
from tests.support.certificates import Certificate, make_certificate
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer, tls_redis_executable
from tests.support.redis_tier import get, open_redis_tier, put, soon

pytestmark = pytest.mark.redis

whole_kit = pytest.mark.skipif(
    "KVFRAMEWORK_REDIS_SERVER" not in os.environ,
    reason="the whole kit over TLS is slow: name a redis-server with TLS in KVFRAMEWORK_REDIS_SERVER",
)

FOUND, MISSING, STORED, DELETED = Outcome.FOUND, Outcome.MISSING, Outcome.STORED, Outcome.DELETED


@pytest.fixture(scope="module")
def executable() -> str:
    found = tls_redis_executable()
    if found is None:
        pytest.skip("no redis-server with TLS on PATH or in KVFRAMEWORK_REDIS_SERVER (Debian: redis-server 7)")
    return found


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def server(
    executable: str, certificate: Certificate, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    """Asks clients for a certificate, too."""
    directory = tmp_path_factory.mktemp("redis")
    with RedisServer(directory, certificate=certificate, executable=executable, password="pw") as server:
        yield server


@pytest.fixture(scope="module")
def cluster(
    executable: str, certificate: Certificate, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisCluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with RedisCluster(directory, certificate=certificate, executable=executable, password="pw") as cluster:
        yield cluster


@pytest.fixture
def files(certificate: Certificate, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.setenv("KVF_TEST_PASSWORD", "pw")
    return {**certificate.options(), "password_env": "KVF_TEST_PASSWORD"}


@whole_kit
class TestOverRealTls(TierConformance):
    use = "redis"
    examples = 5

    @pytest.fixture
    def tier_options(self, server: RedisServer, files: dict[str, object]) -> Mapping[str, object]:
        return {"url": server.url, **files}


@whole_kit
class TestOnAClusterOverTls(TierConformance):
    use = "redis"
    examples = 5

    @pytest.fixture
    def tier_options(self, cluster: RedisCluster, files: dict[str, object]) -> Mapping[str, object]:
        nodes = cluster.nodes
        return {"url": cluster.masters[0].url, "nodes": nodes, "topology": "cluster", **files}


def test_small_and_large_values_travel_over_tls(server: RedisServer, files: dict[str, object]) -> None:
    tier = open_redis_tier(server.url, **files)
    values = {b"small": b"x", b"large": os.urandom(3 << 20), b"empty": b""}
    parts = [[memoryview(value)] for value in values.values()]
    assert tier.put(list(values), parts, deadline=soon()) == [STORED] * 3
    outcomes, found = get(tier, *values, nbytes=3 << 20)
    assert outcomes == [FOUND] * 3
    assert all(buffer.startswith(value) for buffer, value in zip(found, values.values(), strict=True))
    assert tier.delete([*values, b"none"], deadline=soon()) == [DELETED, DELETED, DELETED, MISSING]
    tier.close()


def test_a_client_that_trusts_nobody_or_shows_nothing_is_refused(
    server: RedisServer, files: dict[str, Any], tmp_path: Path
) -> None:
    stranger = make_certificate(tmp_path)
    strangers = {**stranger.options(), "tls_ca": files["tls_ca"]}
    for change in ({"tls_ca": ""}, {"tls_ca": str(stranger.certificate)}, {"tls_cert": "", "tls_key": ""}, strangers):
        tier = open_redis_tier(server.url, **{**files, **change})
        with pytest.raises(TierError):
            tier.ping(deadline=soon())
        tier.close()


def test_slots_move_over_tls(cluster: RedisCluster, files: dict[str, Any]) -> None:
    tier: Tier = open_redis_tier(cluster.running[0].url, topology="cluster", prefix="{moves}", **files)
    slot = 4000
    (slot,) = {int(str(cluster.on(cluster.masters[0], "CLUSTER", "KEYSLOT", "{moves}")))}
    source = cluster.master_of(slot)
    target = cluster.other_than(source)
    assert put(tier, b"stays", b"value") is STORED
    with cluster.migrating(slot, source, target):
        assert put(tier, b"new", b"other") is STORED
        assert get(tier, b"stays", b"new", nbytes=5) == ([FOUND, FOUND], [b"value", b"other"])
        assert tier.delete([b"stays"], deadline=soon()) == [DELETED]
        cluster.move(slot, source, target)
    assert get(tier, b"stays", b"new", nbytes=5)[0] == [MISSING, FOUND]
    assert tier.delete([b"new"], deadline=soon()) == [DELETED]
    tier.close()
