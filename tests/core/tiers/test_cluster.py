"""A server on a Redis Cluster, one master of which is killed in mid load: right bytes, and it goes on."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.core.tiers.engine import Engine
from tests.core.tiers.engines import SMALL_L1, Engines
from tests.core.tiers.nodes import await_count, await_rest, await_state, await_written, count
from tests.core.tiers.prompts import prompt
from tests.support.redis_cluster import RedisCluster
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.redis


def test_a_master_is_killed_in_mid_load(tmp_path: Path, seed: int) -> None:
    with ExitStack() as stack:
        cluster = stack.enter_context(RedisCluster(tmp_path))
        nodes = ", ".join(f'"{each}"' for each in cluster.nodes[1:])
        url = f"redis://{cluster.nodes[0]}"
        table = ("l2.0.use=redis", f"l2.0.url={url}", "l2.0.topology=cluster", f"l2.0.nodes=[{nodes}]")
        server = stack.enter_context(ServerProcess(*table, capacity=SMALL_L1))
        engine = stack.enter_context(Engine(server.endpoint))
        prompts = [prompt(range(10**6 + 100 * number, 10**6 + 100 * number + 8)) for number in range(12)]
        for each in prompts:
            engine.store(each)
        await_written(engine.client)
        engine.clear()
        assert [engine.load(each) for each in prompts] == [8] * len(prompts)
        for pair in zip(cluster.masters, cluster.replicas, strict=True):
            wait_until(lambda pair=pair: len({cluster.on(each, "DBSIZE") for each in pair}) == 1, 60, "replication")

        engines = stack.enter_context(Engines([server.endpoint] * 2, seed=seed))
        await_count(engine.client, "hits", count(engine.client, "hits") + 50)
        cluster.set_everywhere("cluster-node-timeout", "1000")
        cluster.masters[1].kill9()
        found = []
        for each in prompts:
            engine.clear()
            found.append(engine.load(each))
            assert found[-1] <= len(each)
        cluster.await_promotion(cluster.replicas[1])
        await_state(engine.client, "closed")

        def whole() -> bool:
            engines.check()
            engine.clear()
            return [engine.load(each) for each in prompts] == [8] * len(prompts)

        wait_until(whole, 60, f"hits by the promoted replica (first {found})")
        before = count(engine.client, "stored")
        await_count(engine.client, "stored", before + 10)
        for report in engines.stop():
            assert report.chunks_checked > 0
        assert count(engine.client, "corrupt") == 0
        await_rest(engine.client)
