"""Engine processes of SGLang with one prompt, and what they saw of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.sglang.engine_order import Ask, Order, encode, linker_of, storage_of
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

_END_S = 120.0


@dataclass(frozen=True)
class Answer:
    """`cached` tokens of the prompt were not computed; `stored` of them came from the server."""

    tokens: list[int]
    cached: int
    stored: int


@dataclass
class Bench:
    """Where engines run, and with what. `options` are the backend's."""

    model: Path
    directory: Path
    prompt: list[int]
    engine: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def answers(self, server: ServerProcess | None, *asks: Ask, objects: int = 0, **options: Any) -> list[Answer]:
        """The answers of a new engine process; without a server it has no hierarchical cache. It lives until the server
        has as many `objects`. With one, asks once each rank has its pool registered: until then all are misses."""
        asked = [replace(ask) for ask in asks or [Ask(self.prompt)]]
        begin = self.directory / f"begin-{len(list(self.directory.glob('engine-*.log')))}"
        if server is not None:
            asked[0].wait_file = str(begin)
        with self.running(server, *asked, **options) as engine:
            if server is not None:
                engine.expect("waiting")
                settings = {**self.engine, **(options.get("engine") or {})}
                instances = 2 * settings.get("tp_size", 1) * settings.get("pp_size", 1)  # one to load, one to store
                wait_until(lambda: len(server.status()["instances"]) >= instances, _END_S, "the registration")
                begin.touch()
            found = [engine.answer() for _ in asks or [None]]
            if server is not None:
                wait_until(lambda: stored(server) >= objects, what="the stores")
            return found

    # `linker`: with the external linker in the place of the hierarchical cache.
    @contextlib.contextmanager
    def running(
        self,
        server: ServerProcess | None,
        *asks: Ask,
        engine: dict[str, Any] | None = None,
        linker: dict[str, str] | None = None,
        **options: Any,
    ) -> Iterator[Running]:
        storage, linked = {}, {}
        if server is not None and linker is not None:
            linked = linker_of(server.endpoint, **linker)
        elif server is not None:
            storage = storage_of(server.endpoint, **{**self.options, **options})
        log = self.directory / f"engine-{len(list(self.directory.glob('engine-*.log')))}.log"
        hold = log.with_suffix(".end")
        order = Order(str(self.model), list(asks), {**self.engine, **(engine or {})}, storage, str(hold), linked)
        environment = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "0|1" if order.engine.keys() & {"tp_size", "pp_size"} else "0-1",
        }
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.sglang.engine"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **environment},
                text=True,
            )
            running = Running(process, log)
            try:
                process.stdin.write(encode(order))
                process.stdin.close()
                running.expect("ready")
                yield running
                hold.touch()
                process.wait(_END_S)
            finally:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()


def stored(server: ServerProcess) -> int:
    return int(server.status()["l1"]["objects"])


@dataclass
class Running:
    process: subprocess.Popen[str]
    log: Path

    def expect(self, event: str) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line, f"the engine has ended:\n{self.log.read_text()[-6000:]}"
        told: dict[str, Any] = json.loads(line)
        assert told["event"] == event, told
        return told

    def answer(self) -> Answer:
        told = self.expect("answer")
        return Answer(told["tokens"], told["cached"], told["details"].get("storage", 0))
