"""Two nodes with all that they may share: shards, the L1 of each other, a Redis of packed values, and answers that are
held back. Engines of one and two ranks load and store while servers and Redis are killed, stopped and ended."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.core.tiers.engine import Engine
from tests.core.tiers.nodes import await_rest, await_written, count
from tests.core.tiers.prompts import Prompt, overlapping, prompt
from tests.core.tiers.shard_engine import FaultyNode, Lost, ShardEngine
from tests.support.peer_nodes import token_file
from tests.support.ports import free_port
from tests.support.processes import own_bytes
from tests.support.redis_server import RedisServer
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

pytest.importorskip("zstandard", reason="zstandard is not installed")

PEERS, REDIS = 0, 1
ENGINES = 6
FAULTS = [6, pytest.param(400, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
SPARE_BYTES = 48 << 20


class Fleet:
    """Servers that share what they can, at a Redis that forgets; leaving the block ends what was stopped, too."""

    def __init__(self, folder: Path) -> None:
        token = token_file(folder)
        (folder / "redis").mkdir()
        self.redis = RedisServer(folder / "redis", options=("--maxmemory", "24mb", "--maxmemory-policy", "allkeys-lru"))
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        listed = ",".join(f'"{each}"' for each in addresses)
        self._addresses, self._common = (
            addresses,
            [
                "server.tp_lcm=2",
                f"l2.{PEERS}.use=peers",
                f"l2.{PEERS}.token_file={token}",
                f"l2.{PEERS}.peers=[{listed}]",
                f"l2.{PEERS}.timeout_s=1",
                f"l2.{REDIS}.use=redis",
                f"l2.{REDIS}.url={self.redis.url}",
                f"l2.{REDIS}.codec=planes",
                f"l2.{REDIS}.timeout_s=1",
            ],
        )

    def __enter__(self) -> Fleet:
        with ExitStack() as stack:
            stack.enter_context(self.redis)
            self.servers = [
                # 128 objects, fewer than the engines use.
                stack.enter_context(ServerProcess(*self._common, f"l2.{PEERS}.listen={each}", capacity="16MiB"))
                for each in self._addresses
            ]
            self.nodes = [FaultyNode(server) for server in self.servers]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        for server in self.servers:
            if server.process is not None:
                server.sigcont()
        self._stack.close()

    def harm(self, chance: random.Random) -> None:
        pause_s = chance.uniform(0, 0.7)
        if chance.random() < 0.5:
            if chance.random() < 0.5:
                self.redis.kill9()
                time.sleep(pause_s)
                self.redis.start()
            else:
                self.redis.sigstop()
                time.sleep(2 * pause_s)
                self.redis.sigcont()
            return
        node = chance.choice(self.nodes)
        node.faults += 1
        kind = chance.choice(["kill", "stop", "end"])
        if kind == "stop":
            node.server.sigstop()
            time.sleep(2 * pause_s)
            node.server.sigcont()
        else:
            if kind == "kill":
                node.server.kill9()
            else:
                assert node.server.stop() == 0
            time.sleep(pause_s)
            node.server.start()
        node.faults += 1


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path) as running:
        yield running


@pytest.mark.redis
@pytest.mark.parametrize("faults", FAULTS)
def test_no_byte_is_wrong_and_nothing_stays(fleet: Fleet, seed: int, faults: int) -> None:
    first = prompt([10**6, 10**6 + 1, 10**6 + 2])
    here, there = [ShardEngine(node, ranks, f"{seed}/{ranks}") for ranks, node in enumerate(fleet.nodes, 1)]
    with Engine(fleet.servers[0].endpoint) as one, Engine(fleet.servers[1].endpoint) as two:
        here.begin()
        there.begin()
        assert there.store(first) == 2 * len(first)
        await_written(two.client, REDIS)
        wait_until(lambda: _loads(here, one, first, PEERS), 60, "a hit from the other node")
        one.clear()
        wait_until(lambda: _loads(there, two, first, REDIS), 60, "a hit from Redis")
    here.end()
    there.end()

    engines = [ShardEngine(fleet.nodes[at % 2], 1 + at // 2 % 2, f"{seed}/{at}") for at in range(ENGINES)]
    over, broken = threading.Event(), []
    turns = [threading.Thread(target=_turns, args=(each, seed, over, broken.append)) for each in engines]
    before = [own_bytes(server.pid) for server in fleet.servers]
    chance = random.Random(seed)
    for thread in turns:
        thread.start()
    try:
        for _ in range(faults):
            over.wait(chance.uniform(0, 0.7))
            fleet.harm(chance)
    finally:
        over.set()
        for thread in turns:
            thread.join(100)
    assert not broken, broken
    assert not any(thread.is_alive() for thread in turns), "an engine that never ends"
    assert all(engine.loads for engine in engines)
    assert sum(engine.from_l2 for engine in engines) > 0

    for server, bytes_before in zip(fleet.servers, before, strict=True):
        with Engine(server.endpoint) as engine:
            await_rest(engine.client)
            for at in (PEERS, REDIS):
                assert count(engine.client, "corrupt", at) == count(engine.client, "codec_failed", at) == 0
            engine.clear()
            l1 = engine.client.status()["l1"]
            assert (l1["objects"], l1["largest_free_bytes"]) == (0, l1["capacity_bytes"])
        assert own_bytes(server.pid) - bytes_before < SPARE_BYTES
        assert server.stop() == 0
        assert "Traceback" not in server.log


def _loads(engine: ShardEngine, node: Engine, wanted: Prompt, tier: int) -> bool:
    """Load what L1 lacks; whether a tier had it."""
    node.clear()
    return engine.load(wanted) == len(wanted) and count(node.client, "hits", tier) >= 2 * len(wanted)


def _turns(engine: ShardEngine, seed: int, over: threading.Event, broken: Callable[[BaseException], None]) -> None:
    prompts = overlapping(seed, 60)
    try:
        while not over.is_set():
            try:
                engine.begin()
                while not over.is_set():
                    chosen = engine.chance.choice(prompts)
                    if engine.chance.random() < 0.15:
                        engine.leave(chosen)
                    else:
                        engine.load(chosen)
                        engine.store(chosen, ranks=engine.chance.choice([1, 2, 2, 2]))
            except Lost:
                over.wait(0.1)
    except BaseException as error:  # noqa: BLE001  the test shows it
        broken(error)
        over.set()
    finally:
        engine.end()
