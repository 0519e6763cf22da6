"""Two SGLang engines behind one server: conversations at the same time, requests broken off, an engine and the server
killed. No wrong token, and nothing is kept."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.engine_order import Order, settings_of, storage_of
from tests.sglang.model import make
from tests.support.engine_soak.conversations import Talk
from tests.support.engine_soak.engine import Answer, Engine
from tests.support.engine_soak.run import soak
from tests.support.held_server import HeldServer

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.engine_feature("SGLang", "soak")
def test_conversations_with_two_engines(tmp_path: Path) -> None:
    models = Path(os.environ.get("KVF_SGLANG_MODELS", Path(tempfile.gettempdir()) / "kvf-sglang-models"))
    seconds = float(os.environ.get("KVF_SGLANG_SOAK_S", "150"))
    seen = soak(SGLang(make(models / "tiny", "tiny")), TALK, HeldServer(capacity="12MiB"), tmp_path, seconds)
    print(seen)
    assert seen["answers"] >= TALK.conversations * TALK.turns
    assert seen["broken off"]
    assert seen["tokens cached"]
    assert any(seen["evictions"])
    assert seen["recovered"]["objects"]


TALK = Talk()
# SGLang's pools forget, so that what is asked again comes from the server, whose memory is too small as well.
POOLS: dict[str, Any] = {"max_total_tokens": 4096, "hicache_ratio": 1.25, "max_running_requests": 4}
OPTIONS: dict[str, Any] = {"prefetch_threshold": 64, "kvframework.deadline_scale": 10.0}


class SGLang:
    """The HTTP server of SGLang with the storage backend; without an endpoint it has no hierarchical cache."""

    def __init__(self, model: Path) -> None:
        self._model = model

    def command(self, port: int, endpoint: str) -> Sequence[str]:
        storage = storage_of(endpoint, **OPTIONS) if endpoint else {}
        pools = POOLS if endpoint else {**POOLS, "hicache_ratio": 2.0}
        # SGLang's warm-up waits until it listens itself, else it logs an error on a busy machine.
        server = {"host": "127.0.0.1", "port": port, "skip_server_warmup": False}
        settings = settings_of(Order(str(self._model), [], {**pools, **server}, storage))
        return [sys.executable, "-m", "tests.sglang.http_engine", json.dumps(settings)]

    def environment(self) -> Mapping[str, str]:
        return {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0-1"}

    def request(self, tokens: list[int], new_tokens: int, *, stream: bool) -> tuple[str, dict[str, Any]]:
        sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
        return "/generate", {"input_ids": tokens, "sampling_params": sampling, "stream": stream}

    def answer(self, reply: Any) -> Answer:
        return Answer(reply["output_ids"], (reply["meta_info"].get("cached_tokens_details") or {}).get("storage", 0))

    def faults(self, engine: Engine, *, server_killed: bool) -> list[str]:
        """Lines of its log: a call that raised, in the storage or in SGLang."""
        lines = engine.log.read_text().splitlines()
        return [line for line in lines if "the engine continues without the cache" in line or "Traceback" in line]
