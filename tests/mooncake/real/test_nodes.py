"""Two servers on one Mooncake Store, whose helpers and peer are killed and stopped while engines check every byte."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.core.tiers.engine import Engine
from tests.core.tiers.engines import SMALL_L1, Engines
from tests.core.tiers.nodes import await_count, await_rest, await_state, await_written, count
from tests.core.tiers.prompts import prompt
from tests.mooncake.real.store import MooncakeStore
from tests.support.processes import has_ended, send
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

_KILLS = 6


@pytest.fixture
def nodes(store: MooncakeStore) -> Iterator[list[ServerProcess]]:
    table = ("l2.0.use=mooncake", f"l2.0.master={store.address}")
    with ExitStack() as stack:
        yield [stack.enter_context(ServerProcess(*table, capacity=SMALL_L1)) for _ in range(2)]


def helper_of(server: ServerProcess) -> int | None:
    """The helper is the server's child that runs a tier."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in (Path(f"/proc/{server.pid}/task")).iterdir():
            for child in (task / "children").read_text().split():
                if b"helper_tier" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
    return None


def test_what_one_node_computed_is_a_hit_on_the_other(nodes: list[ServerProcess]) -> None:
    with Engine(nodes[0].endpoint) as first, Engine(nodes[1].endpoint) as second:
        first.store(prompt(range(8)))
        await_written(first.client)
        assert second.load(prompt(range(8))) == 8


def test_no_byte_is_wrong_while_helpers_are_killed_and_stopped(
    store: MooncakeStore, nodes: list[ServerProcess], seed: int
) -> None:
    chance = random.Random(seed)
    with ExitStack() as stack:
        asking = [stack.enter_context(Engine(node.endpoint)) for node in nodes]
        engines = stack.enter_context(Engines([node.endpoint for node in nodes], seed=seed))
        for number in range(_KILLS):
            node = number % 2
            await_count(asking[node].client, "hits", count(asking[node].client, "hits") + 20)
            killed = helper_of(nodes[node])
            assert killed
            send(killed, chance.choice([signal.SIGKILL, signal.SIGSTOP]))
            wait_until(lambda killed=killed: has_ended(killed), 60, "the end of a helper")
            await_state(asking[node].client, "closed")
            engines.check()
        store.peers[0].sigstop()
        wait_until(lambda: count(asking[0].client, "errors") > 0, 60, "an error")
        store.peers[0].sigcont()
        for each in asking:
            await_state(each.client, "closed")
            await_count(each.client, "hits", count(each.client, "hits") + 20)
        for report in engines.stop():
            assert report.chunks_checked > 0
        for each in asking:
            assert count(each.client, "corrupt") == 0
            await_rest(each.client)
