"""Two servers and four engine processes on one store: what is computed through one server is a hit on the other, and
every byte is compared."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.core.tiers.engine import Engine
from tests.core.tiers.engines import SMALL_L1, Engines
from tests.core.tiers.nodes import await_rest, await_written, count
from tests.core.tiers.prompts import overlapping, prompt
from tests.support.processes import own_bytes
from tests.support.server_process import ServerProcess

ROUNDS = [150, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]


@pytest.fixture(params=[pytest.param("redis", marks=pytest.mark.redis), "folder"])
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[ServerProcess]]:
    """Two servers that share a Redis or a folder."""
    if request.param == "redis":
        store = ["l2.0.use=redis", f"l2.0.url={request.getfixturevalue('redis').url}"]
    else:
        store = ["l2.0.use=filesystem", f"l2.0.path={tmp_path / 'shared'}", "l2.0.shared=true"]
    store.append("l2.0.timeout_s=20")  # a busy test machine is no failure of the store
    with ExitStack() as stack:
        yield [stack.enter_context(ServerProcess(*store, capacity=SMALL_L1)) for _ in range(2)]


@pytest.mark.parametrize("rounds", ROUNDS)
def test_what_one_node_computed_is_a_hit_on_the_other(nodes: list[ServerProcess], seed: int, rounds: int) -> None:
    first = prompt([10**6, 10**6 + 1, 10**6 + 2])
    with Engine(nodes[0].endpoint) as here, Engine(nodes[1].endpoint) as there:
        assert here.store(first).stored == len(first)
        await_written(here.client)
        assert there.load(first) == len(first)

    with Engines([node.endpoint for node in (*nodes, *nodes)], seed=seed, rounds=rounds) as engines:
        reports = engines.finish()
    assert [report.rounds for report in reports] == [rounds] * 4
    assert sum(report.chunks_checked for report in reports) > 0

    everything = overlapping(seed)
    stored = [everything[index] for index in sorted({index for report in reports for index in report.stored})]
    with Engine(nodes[0].endpoint) as here, Engine(nodes[1].endpoint) as there:
        for engine in (here, there):
            await_rest(engine.client)
            assert count(engine.client, "hits") > 0, "this node never loaded from the store"
            assert count(engine.client, "corrupt") == count(engine.client, "errors") == 0
        lost = sum(count(each.client, name) for each in (here, there) for name in ("write_lost", "write_dropped"))
        here.clear()
        for each in stored:
            assert here.load(each) == len(each) or lost, "what was written is not there"
            here.store(each)  # L1 may have had no room for it until it was written
            await_written(here.client)
        there.clear()
        assert [there.load(each) for each in stored] == [len(each) for each in stored]
        for engine in (here, there):
            await_rest(engine.client)


# Without a codec no second copy of an object lives outside the arena: the server's own memory stays what it was while
# many times the arena goes through it.


MIB = 1 << 20
HIDDEN = 4096
OBJECT_BYTES = 16 * MIB


class Peak:
    """The most anonymous memory that a process had; the arena, which is a shared mapping, is none."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.first = self.most = own_bytes(pid)
        self._ended = threading.Event()

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, own_bytes(self._pid))

    @contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()


@pytest.fixture(params=[pytest.param("redis", marks=pytest.mark.redis), "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    if request.param == "redis":
        return ["l2.0.use=redis", f"l2.0.url={request.getfixturevalue('redis').url}", "l2.0.timeout_s=20"]
    return ["l2.0.use=filesystem", f"l2.0.path={tmp_path / 'kv'}", "l2.0.timeout_s=20"]


def test_many_times_the_arena_leaves_the_servers_memory_as_it_was(store: list[str]) -> None:
    # Of 64 MiB each, all of which is written and read in one batch.
    prompts = [prompt(range(100 * number, 100 * number + 4)) for number in range(8)]
    with (
        ServerProcess("server.chunk_size=256", *store, capacity="128MiB") as server,
        Engine(server.endpoint, hidden=HIDDEN) as engine,
    ):
        engine.store(prompt([10**6]))
        await_written(engine.client)
        peak = Peak(server.pid)
        with peak.watching():
            for each in prompts:
                assert engine.store(each).stored == len(each)
                await_written(engine.client)
            assert [engine.load(each) for each in prompts] == [4] * len(prompts)
        assert count(engine.client, "bytes_written") >= 512 * MIB
        assert count(engine.client, "bytes_read") >= 512 * MIB
        grown = peak.most - peak.first
        assert grown < OBJECT_BYTES, f"{grown / MIB:.1f} MiB more than {peak.first / MIB:.1f}"
        await_rest(engine.client)
