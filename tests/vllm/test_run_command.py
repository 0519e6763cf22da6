"""`kvframework run` in front of vLLM: after a restart of the engine the same prompt is a hit, with the same answer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvframework.errors import ConfigFieldError
from tests.support.ports import free_port
from tests.support.waiting import wait_until
from tests.vllm.model import cached

pytest.importorskip("kvf_run")
# Both import vLLM's package for the engine.
from tests.support.user_node import Node, user_node

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
START_S = 800.0
PROMPT = [7 + number % 900 for number in range(1000)]


@contextlib.contextmanager
def engine(node: Node, model: Path, log: Path) -> Iterator[int]:
    """vLLM's OpenAI server by the command `vllm serve`, behind `kvframework run`; yields its port."""
    port = free_port()
    vllm = Path(sys.executable).with_name("vllm")
    options = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    options += ["--max-model-len", "2048", "--kv-cache-memory-bytes", str(1 << 28), "--enable-prompt-tokens-details"]
    command = node.command("run", "--l1", "256MiB", "--", str(vllm), "serve", str(model), *options)
    environ = node.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # the reset of the engine's cache
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "0-1"),
    }
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environ)
    try:
        wait_until(lambda: process.poll() is not None or answers(port), START_S, "the OpenAI server")
        assert process.poll() is None, log.read_text()[-6000:]
        yield port
        process.send_signal(signal.SIGTERM)
        process.wait(120)
    finally:
        process.kill()
        process.wait()


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
        return True
    return False


def asked(port: int, model: Path) -> tuple[list[int], int]:
    body = {"model": str(model), "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as reply:
        answer: dict[str, Any] = json.load(reply)
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0


def test_the_same_prompt_is_a_hit_after_a_restart_of_the_engine(tmp_path: Path) -> None:
    model = cached("tiny")
    with user_node() as node:
        with engine(node, model, tmp_path / "first.log") as port:
            cold, before = asked(port, model)
        keeper = node.keeper
        assert keeper is not None
        with engine(node, model, tmp_path / "second.log") as port:
            hit, after = asked(port, model)
            words = "try", "--url", f"http://127.0.0.1:{port}", "--tokens", "300", "--reset", "--yes", "--json"
            tried = json.loads(node.ask(*words, "--endpoint", node.endpoint, timeout=600).stdout)
            stats = json.loads(node.ask("stats", "--json").stdout)
        assert node.keeper == keeper
    assert before == 0
    assert after == 768
    assert hit == cold
    assert tried["hit"], tried
    assert tried["estimated_saved_s"] > 0
    assert tried["cached_tokens"] >= 256
    assert "tokens in L1" in tried["server"]
    assert stats["l1_tokens"] >= after + tried["cached_tokens"]
    assert stats["prefill_saved_s"] > 0
    first = (tmp_path / "first.log").read_text()
    assert "kvframework: started the server" in first
    assert "python -m vllm.entrypoints.openai.api_server starts instead" in first


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, as vLLM is imported
def test_the_option_autostart_starts_one_server_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvf_vllm.connector import connect
    from kvf_vllm.options import parse_options

    with user_node() as node:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(node.folder))
        monkeypatch.delenv("KVFRAMEWORK_ENDPOINT", raising=False)
        options = parse_options({"kvframework.autostart": "64MiB"})
        assert node.keeper is None
        for _ in range(2):
            with connect(options, "worker") as client:
                assert client.wait_up(60)
        assert node.keeper is not None
    with pytest.raises(ConfigFieldError, match="autostart"):
        parse_options({"kvframework.autostart": "much"})
