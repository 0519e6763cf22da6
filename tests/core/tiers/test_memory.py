"""Without a codec no second copy of an object lives outside the arena: the server's own memory stays what it was while
many times the arena goes through it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.core.tiers.engine import Engine
from tests.core.tiers.nodes import await_rest, await_written, count
from tests.core.tiers.prompts import prompt
from tests.support.server_process import ServerProcess

MIB = 1 << 20
HIDDEN = 4096
OBJECT_BYTES = 16 * MIB


class Peak:
    """The most anonymous memory that a process had; the arena, which is a shared mapping, is none."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self.first = self.most = self._now()
        self._ended = threading.Event()

    def _now(self) -> int:
        (line,) = [line for line in self._status.read_text().splitlines() if line.startswith("RssAnon")]
        return int(line.split()[1]) << 10

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, self._now())

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
    with ServerProcess(*store, capacity="128MiB") as server, Engine(server.endpoint, hidden=HIDDEN) as engine:
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
