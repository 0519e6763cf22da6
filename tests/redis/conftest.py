"""A Redis Cluster for all tests of this folder, started for the first that asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvframework.api.tier import Tier
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_tier import Opened, open_redis_tier


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """Three masters and three replicas. A test may make other nodes masters, but leaves all six at work."""
    with RedisCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Makes tiers that are closed when the test ends."""
    with ExitStack() as stack:

        def opens(url: str, **options: object) -> Tier:
            tier = open_redis_tier(url, **options)
            stack.callback(tier.close)
            return tier

        yield opens


@pytest.fixture
def on_cluster(cluster: RedisCluster, opened: Opened) -> Opened:
    """Makes tiers on the cluster that are closed when the test ends."""
    return lambda url="", **options: opened(
        url or cluster.running[0].url, **{"topology": "cluster", "nodes": cluster.nodes, **options}
    )
