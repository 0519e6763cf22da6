"""Two vLLM engines behind one server: conversations at the same time, requests broken off, an engine and the server
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

from tests.support.engine_soak.conversations import Talk
from tests.support.engine_soak.engine import Answer, Engine
from tests.support.engine_soak.run import NotRepeatableError, soak
from tests.support.held_server import HeldServer
from tests.support.server_process import ServerProcess
from tests.vllm import hybrid_models
from tests.vllm.model import make

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(("model", "server"), [("tiny", ServerProcess), ("lfm2", HeldServer)])
@pytest.mark.parametrize("connector", ["KvFrameworkConnector", "KvFrameworkOffloading"])
@pytest.mark.engine_feature("vLLM", "soak")
def test_conversations_with_two_engines(
    tmp_path: Path, model: str, server: type[ServerProcess], connector: str
) -> None:
    cache = Path(os.environ.get("KVF_VLLM_MODELS", Path(tempfile.gettempdir()) / "kvf-vllm-models"))
    seconds = float(os.environ.get("KVF_VLLM_SOAK_S", "150"))
    try:
        maker = hybrid_models.make if model in hybrid_models.FAMILIES else make
        seen = run(maker(cache / model, model), server(capacity="20MiB"), tmp_path, seconds, connector)
    except NotRepeatableError as error:
        pytest.skip(f"vLLM without a connector: {error}")
    print(seen)
    assert seen["answers"] >= TALK.conversations * TALK.turns
    assert seen["broken off"]
    assert seen["tokens cached"]
    assert seen["preemptions"]
    assert all(seen["evictions"])
    assert bool(seen["recovered"]["objects"]) == (server is HeldServer)
    # Of the engine that lives on; vLLM's CPU worker grows by itself, with or without a connector.
    before, after = (each[1] for each in seen["MiB of the engines' processes"][1::2])
    grown = {name: after[name] - before[name] for name in before if "Worker" not in name}
    assert grown
    assert all(mib < 30 for mib in grown.values()), seen


TALK = Talk()
_ERRORS = "kvframework:errors_total"
MODULES = {"KvFrameworkConnector": "kvf_vllm.connector", "KvFrameworkOffloading": "kvf_vllm.offloading.connector"}


class VLLM:
    """vLLM's OpenAI server with the connector. `metrics` are the connector's, of the engines at rest."""

    def __init__(self, model: Path, connector: str = "KvFrameworkConnector") -> None:
        self._model, self._connector = model, connector
        self.metrics: list[dict[str, float]] = []

    def command(self, port: int, endpoint: str) -> Sequence[str]:
        options = f"--host 127.0.0.1 --port {port} --dtype float32 --max-model-len 2048 --max-num-seqs 8 "
        # Little memory: requests are preempted, and vLLM's own cache forgets.
        options += f"--kv-cache-memory-bytes {14 << 20} --enforce-eager --enable-prompt-tokens-details"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._model)]
        command += options.split()
        if endpoint:
            connector = {
                "kv_connector": self._connector,
                "kv_connector_module_path": MODULES[self._connector],
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"kvframework.endpoint": endpoint, "kvframework.deadline_scale": 10.0},
            }
            command += ["--kv-transfer-config", json.dumps(connector)]
        return command

    def environment(self) -> Mapping[str, str]:
        bind = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "0-1")
        return {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_OMP_THREADS_BIND": bind,
        }

    def request(self, tokens: list[int], new_tokens: int, *, stream: bool) -> tuple[str, dict[str, Any]]:
        body = {
            "model": str(self._model),
            "prompt": tokens,
            "max_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        }
        return "/v1/completions", body

    def answer(self, reply: Any) -> Answer:
        cached = (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answer(reply["choices"][0]["token_ids"], cached)

    def faults(self, engine: Engine, *, server_killed: bool) -> list[str]:
        """Tracebacks, and what the connector counts as errors: a transfer for which there is no server is one."""
        metrics = engine.metrics()
        lines = [line for line in engine.log.read_text().splitlines() if "Traceback" in line]
        if server_killed:
            self.metrics.append(metrics)
            return lines
        return lines + [f"{metrics[_ERRORS]} {_ERRORS}"] * bool(metrics.get(_ERRORS))


def run(model: Path, server: ServerProcess, directory: Path, seconds: float, connector: str) -> dict[str, Any]:
    kind = VLLM(model, connector)
    seen = soak(kind, TALK, server, directory, seconds)

    def total(name: str) -> float:
        return sum(each.get(name, 0) for each in kind.metrics)

    counters = (name for name in kind.metrics[0] if name.startswith("kvframework:") and name.endswith("_total"))
    return seen | {
        "preemptions": total("vllm:num_preemptions_total"),
        "connector": {name: total(name) for name in sorted(counters)},
    }
