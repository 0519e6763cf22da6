"""The `redis` tier on a faulty wire, over a Unix socket; over TCP it meets the same faults in its own tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvf_dev.testing import FaultProxy
from kvf_dev.testing.tier.faults import WireFaultTests
from kvframework.api.tier import Tier
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), unix=True) as server:
        yield server


class TestRedisOnAFaultyWire(WireFaultTests):
    use = "redis"

    @pytest.fixture
    def proxy(self, server: RedisServer) -> Iterator[FaultProxy]:
        with FaultProxy(str(server.socket_path)) as proxy:
            yield proxy

    @pytest.fixture
    def tier_options(self, proxy: FaultProxy) -> dict[str, object]:
        return {"url": f"unix://{proxy.address}"}

    @pytest.fixture
    def faulty_tier(self, tier: Tier, proxy: FaultProxy) -> tuple[Tier, FaultProxy]:
        return tier, proxy
