"""Two engine processes of transformers behind one server: conversations at the same time, generations broken off, an
engine and the server killed. No wrong token, and nothing is kept."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_soak.conversations import Talk
from tests.support.engine_soak.engine import Answer, Engine
from tests.support.engine_soak.run import soak
from tests.support.held_server import HeldServer
from tests.support.server_process import ServerProcess

pytestmark = [pytest.mark.transformers, pytest.mark.slow, pytest.mark.timeout(3600)]

CHUNK = 64
TALK = Talk(vocabulary=(2, 97))


class Transformers:
    def __init__(self, family: str) -> None:
        self._family = family

    def command(self, port: int, endpoint: str) -> Sequence[str]:
        return [sys.executable, "-m", "tests.transformers.http_server", str(port), self._family, endpoint]

    def environment(self) -> Mapping[str, str]:
        return {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def request(self, tokens: list[int], new_tokens: int, *, stream: bool) -> tuple[str, dict[str, Any]]:
        return "/generate", {"tokens": tokens, "count": new_tokens}

    def answer(self, reply: Any) -> Answer:
        return Answer(reply["tokens"], reply["cached"])

    def faults(self, engine: Engine, *, server_killed: bool) -> list[str]:
        signs = ["Traceback"] if server_killed else ["Traceback", "WARNING:kvf_"]
        return [line for line in engine.log.read_text().splitlines() if any(sign in line for sign in signs)]


@pytest.mark.parametrize(
    ("family", "server", "capacity"),
    # Too small for all conversations.
    [("llama", ServerProcess, "4MiB"), ("qwen3.5", HeldServer, "1MiB")],
)
@pytest.mark.engine_feature("transformers", "soak")
def test_conversations_with_two_engines(
    tmp_path: Path, family: str, server: type[ServerProcess], capacity: str
) -> None:
    seconds = float(os.environ.get("KVF_TRANSFORMERS_SOAK_S", "150"))
    running = server(f"server.chunk_size={CHUNK}", capacity=capacity)
    seen = soak(Transformers(family), TALK, running, tmp_path, seconds)
    print(seen)
    assert seen["answers"] >= TALK.conversations * TALK.turns
    assert seen["broken off"]
    assert seen["tokens cached"]
    assert any(seen["evictions"])
    assert bool(seen["recovered"]["objects"]) == (server is HeldServer)
