"""SGLang's side of the soak of two engines: `python -m tests.sglang.soak --seconds 150` prints what was seen."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.sglang.engine_order import Order, settings_of, storage_of
from tests.sglang.model import make
from tests.support.engine_soak.conversations import Talk
from tests.support.engine_soak.engine import Answer, Engine
from tests.support.engine_soak.run import soak
from tests.support.held_server import HeldServer

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


def run(model: Path, directory: Path, seconds: float) -> dict[str, Any]:
    """What was seen, for those who read it."""
    return soak(SGLang(model), TALK, HeldServer(capacity="12MiB"), directory, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "kvf-sglang-models")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvf-soak-") as directory:
        for name, value in run(make(arguments.models / "tiny", "tiny"), Path(directory), arguments.seconds).items():
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
