"""vLLM's side of the soak of two engines: `python -m tests.vllm.soak --seconds 180` prints what was seen."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.engine_soak.conversations import Talk
from tests.support.engine_soak.engine import Answer, Engine
from tests.support.engine_soak.run import soak
from tests.support.server_process import ServerProcess
from tests.vllm import hybrid_models
from tests.vllm.model import make

TALK = Talk()
_ERRORS = "kvframework:errors_total"


class VLLM:
    """vLLM's OpenAI server with the connector. `metrics` are the connector's, of the engines at rest."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self.metrics: list[dict[str, float]] = []

    def command(self, port: int, endpoint: str) -> Sequence[str]:
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(self._model),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--dtype",
            "float32",
            "--max-model-len",
            "2048",
            "--enforce-eager",
            # Little memory: requests are preempted, and vLLM's own cache forgets.
            "--kv-cache-memory-bytes",
            str(14 << 20),
            "--max-num-seqs",
            "8",
            "--enable-prompt-tokens-details",
        ]
        if endpoint:
            connector = {
                "kv_connector": "KvFrameworkConnector",
                "kv_connector_module_path": "kvf_vllm.connector",
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
        return lines + [f"{metrics[_ERRORS]} {_ERRORS}"] * bool(metrics[_ERRORS])


def model_of(cache: Path, name: str) -> Path:
    """A model by its size, or by its family for one with recurrent layers."""
    return hybrid_models.make(cache / name, name) if name in hybrid_models.FAMILIES else make(cache / name, name)


def run(model: Path, server: ServerProcess, directory: Path, seconds: float) -> dict[str, Any]:
    """What was seen, for those who read it."""
    kind = VLLM(model)
    seen = soak(kind, TALK, server, directory, seconds)

    def total(name: str) -> float:
        return sum(each.get(name, 0) for each in kind.metrics)

    counters = (name for name in kind.metrics[0] if name.startswith("kvframework:") and name.endswith("_total"))
    return seen | {
        "preemptions": total("vllm:num_preemptions_total"),
        "connector": {name: total(name) for name in sorted(counters)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "kvf-vllm-models")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvf-soak-") as directory:
        model = model_of(arguments.models, arguments.model)
        server = ServerProcess(capacity="20MiB")
        for name, value in run(model, server, Path(directory), arguments.seconds).items():
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
