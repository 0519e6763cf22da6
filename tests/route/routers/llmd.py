"""llm-d's index, in a program of its own that go/README.md describes: how many blocks of a prompt an engine has."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import pytest

from tests.events.node import BLOCK
from tests.support.waiting import wait_until

PROGRAM = "KVF_ROUTERS_LLMD_INDEX"
WAIT_S = 60
# What a block counts by its tier.
CPU = 0.8


class LlmD:
    """One subscription, to `kv@`, of one central index."""

    def __init__(self, events: str, replay: str, *, block: int = BLOCK) -> None:
        program = os.environ.get(PROGRAM)
        if not program:
            pytest.skip(f"{PROGRAM} names no program: tests/route/routers/go/README.md")
        self._block = block
        self._folder = tempfile.TemporaryDirectory(prefix="kvf-")
        self._log = Path(self._folder.name) / "llmd.log"
        with self._log.open("wb") as log:
            command = [program, events, replay, str(block)]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self._port = int(self._process.stdout.readline())

    def __enter__(self) -> LlmD:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc: BaseException | TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate(timeout=WAIT_S)
        if kind is not None:
            print(self._log.read_text()[-20_000:])
        self._folder.cleanup()

    def matched(self, tokens: Sequence[int], engine: str = "", model: str = "tiny") -> int:
        """The tokens of a prompt that an engine has in its CPU's memory; of the first engine there is, without one."""
        question = json.dumps({"tokens": list(tokens), "model": model}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}/score", question)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=WAIT_S) as answer:
            scores: dict[str, float] = json.load(answer)
        score = scores.get(engine, 0.0) if engine else max(scores.values(), default=0.0)
        return round(score / CPU) * self._block

    def until(self, right: Callable[[], object], what: str = "what llm-d knows") -> None:
        wait_until(right, WAIT_S, what)
