"""Servers that lend L1 to each other, with engines that check every byte: what one node computed is a hit on the
others, whichever of them is killed, stopped or started again meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.core.tiers.engine import Engine
from tests.core.tiers.engines import SMALL_L1, Engines
from tests.core.tiers.nodes import await_rest, count, tier
from tests.core.tiers.prompts import Prompt, prompt
from tests.support.peer_nodes import token_file
from tests.support.ports import free_port
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

# Objects of 16 MiB, so that faults come in the middle of one.
WIDE = 4096
FAULT_ROUNDS = 12


class Fleet:
    """Servers on loopback, each of which has the whole list."""

    def __init__(self, folder: Path, number: int, *, capacity: str, timeout_s: float) -> None:
        token = token_file(folder)
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(number)]
        listed = "[" + ",".join(f'"{each}"' for each in self.addresses) + "]"
        common = [
            "server.chunk_size=256",
            "l2.0.use=peers",
            f"l2.0.token_file={token}",
            f"l2.0.peers={listed}",
            "l2.0.ask_s=5",
            f"l2.0.timeout_s={timeout_s}",
        ]
        self.servers = [ServerProcess(*common, f"l2.0.listen={each}", capacity=capacity) for each in self.addresses]

    def __enter__(self) -> Fleet:
        with ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        for server in self.servers:
            if server.process is not None:
                server.sigcont()
        self._stack.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path, 3, capacity=SMALL_L1, timeout_s=20) as running:
        yield running


def load_once_up(engine: Engine, wanted: Prompt) -> None:
    """Once the nodes know each other, and the circuit is closed."""
    wait_until(lambda: engine.load(wanted) == len(wanted), 60, "a hit from another node")


def test_what_one_node_computed_is_a_hit_on_all(fleet: Fleet) -> None:
    first, second = prompt([10**6, 10**6 + 1, 10**6 + 2]), prompt([10**6 + 9])
    with ExitStack() as stack:
        one, two, three = [stack.enter_context(Engine(each.endpoint)) for each in fleet.servers]
        assert one.store(first).stored == len(first)
        load_once_up(two, first)
        load_once_up(three, first)
        for engine in (one, two, three):
            engine.clear()
        assert two.load(first) == 0
        three.store(second)
        load_once_up(one, second)
        load_once_up(two, second)
        for engine in (one, two, three):
            await_rest(engine.client)
            found = tier(engine.client)
            assert (found["write_policy"], found["read_only"], found["corrupt"], found["stored"]) == (
                "none",
                True,
                0,
                0,
            )


def test_nodes_that_load_from_each_other_at_once_do_not_wait_for_each_other(fleet: Fleet, seed: int) -> None:
    endpoints = [server.endpoint for server in fleet.servers]
    with Engines([*endpoints, *endpoints], seed=seed, rounds=60) as engines:
        reports = engines.finish()
    assert [report.rounds for report in reports] == [60] * 6
    assert sum(report.chunks_checked for report in reports) > 0
    for endpoint in endpoints:
        with Engine(endpoint) as engine:
            await_rest(engine.client)
            assert count(engine.client, "corrupt") == 0
            assert count(engine.client, "hits") > 0, "this node never loaded from another one"


def test_no_byte_is_wrong_or_late_while_nodes_are_killed_and_stopped(tmp_path: Path, seed: int) -> None:
    """The first node reads, the others hold. What was to come from a node that stopped in mid-value must not arrive
    once it goes on: the room belongs to other prompts by then."""
    chance = random.Random(seed)
    with Fleet(tmp_path, 4, capacity="144MiB", timeout_s=1) as fleet:
        reader, *holders = fleet.servers
        with Engine(reader.endpoint, hidden=WIDE) as engine:
            loaded = 0
            for number in range(FAULT_ROUNDS):
                holder = chance.choice(holders)
                wanted = prompt(range(number * 100, number * 100 + 4))
                with Engine(holder.endpoint, hidden=WIDE) as other:
                    assert other.store(wanted).stored == len(wanted)
                reply = engine.look_up(wanted)
                fault = chance.choice(["stop", "kill", "end"])
                _ = [engine.client.status() for _ in range(chance.randrange(6))]  # time passes
                if fault == "stop":
                    holder.sigstop()
                elif fault == "kill":
                    holder.kill9()
                else:
                    holder.stop()
                reply = engine.settled(reply)
                chunks = reply.hit_tokens // 256
                assert not chunks or engine.retrieve(wanted, chunks)
                engine.free(reply)
                loaded += chunks
                own = prompt(range(number * 100 + 50, number * 100 + 58))
                engine.store(own)
                if fault == "stop":
                    holder.sigcont()
                else:
                    holder.start()
                wait_until(lambda: not _lends(fleet, holder), 60, "the end of what it lent")  # noqa: B023
                stored = engine.look_up(own)
                mine = engine.settled(stored)
                assert engine.retrieve(own, mine.hit_tokens // 256)
                engine.free(mine)
            found = tier(engine.client)
            assert found["corrupt"] == 0
            await_rest(engine.client)
            everything = prompt(range(4))
            with Engine(holders[0].endpoint, hidden=WIDE) as other:
                other.store(everything)
                engine.clear()
                load_once_up(engine, everything)
    print(f"{loaded} chunks came during faults")


def _lends(fleet: Fleet, holder: ServerProcess) -> bool:
    with holder.client() as client:
        return bool(client.status()["l1"]["pins"])
