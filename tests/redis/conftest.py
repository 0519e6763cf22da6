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
def on_cluster(cluster: RedisCluster) -> Iterator[Opened]:
    """Makes tiers on the cluster that are closed when the test ends."""
    with ExitStack() as stack:

        def opens(url: str = "", **options: object) -> Tier:
            given = {"topology": "cluster", "nodes": cluster.nodes, **options}
            tier = open_redis_tier(url or cluster.running[0].url, **given)
            stack.callback(tier.close)
            return tier

        yield opens
