"""`kvframework run` in front of SGLang: after a restart of the engine the same prompt is a hit, with the answer and the
exit status of an engine without it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.sglang.model import make
from tests.support.ports import free_port
from tests.support.waiting import wait_until

pytest.importorskip("kvf_run")
from tests.support.user_node import Node, user_node

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]
START_S = 600.0
ROOT = Path(__file__).resolve().parents[2]
# Python imports it first, in the server and in each process that this starts.
STAND_INS = """
import sys, types
if "sglang.launch_server" in sys.orig_argv or "--multiprocessing-fork" in sys.orig_argv:
    from tests.sglang.standins import everything
    everything.install()
    sys.modules["soundfile"] = types.ModuleType("soundfile")
"""
OPTIONS = "--host 127.0.0.1 --device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch "
OPTIONS += "--disable-overlap-schedule --page-size 64 --max-total-tokens 4096 --max-running-requests 2 "
OPTIONS += "--chunked-prefill-size 2048 --mem-fraction-static 0.5 --random-seed 1 --log-level info --enable-metrics "
OPTIONS += "--hicache-io-backend direct --hicache-mem-layout layer_first --hicache-ratio 2.0 "
OPTIONS += "--hicache-storage-prefetch-policy wait_complete"
PROMPT = " ".join(f"word{number % 700}" for number in range(400))


class Seen(NamedTuple):
    text: str
    cached: int
    status: int


@contextlib.contextmanager
def engine(node: Node, model: Path, log: Path, *before: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """SGLang's server by its own command, behind `before`; yields its port."""
    port = free_port()
    site = node.folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(STAND_INS)
    words = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
    environ = node.environ | {
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT), node.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0-1",
    }
    with log.open("w") as output:
        process = subprocess.Popen([*before, *words, *OPTIONS.split()], stdout=output, stderr=output, env=environ)
    try:
        wait_until(lambda: process.poll() is not None or answers(port), START_S, "the server")
        assert process.poll() is None, log.read_text()[-6000:]
        yield port, process
    finally:
        process.kill()
        process.wait()


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health_generate", timeout=60):
        return True
    return False


def asked(port: int, model: Path) -> tuple[str, int]:
    body = {"model": str(model), "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as reply:
        answer: dict[str, Any] = json.load(reply)
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["text"], details.get("cached_tokens") or 0


def ended(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(120)


def test_the_same_prompt_is_a_hit_after_a_restart_of_the_engine(tmp_path: Path) -> None:
    models = Path(os.environ.get("KVF_SGLANG_MODELS", Path(tempfile.gettempdir()) / "kvf-sglang-models"))
    model = make(models / "tiny", "tiny")
    with user_node() as node:
        run = node.command("run", "--l1", "256MiB", "--")
        with engine(node, model, tmp_path / "bare.log") as (port, process):
            bare = Seen(*asked(port, model), ended(process))
        with engine(node, model, tmp_path / "first.log", *run) as (port, process):
            cold = Seen(*asked(port, model), ended(process))
        keeper = node.keeper
        assert keeper is not None
        with engine(node, model, tmp_path / "second.log", *run) as (port, process):
            text, cached = asked(port, model)
            words = "try", "--url", f"http://127.0.0.1:{port}", "--tokens", "400", "--json"
            tried = json.loads(node.ask(*words, "--endpoint", node.endpoint, timeout=900).stdout)
            stats = json.loads(node.ask("stats", "--json").stdout)
            hit = Seen(text, cached, ended(process))
        assert node.keeper == keeper
    assert (bare.cached, cold.cached) == (0, 0)
    assert hit.cached >= 256
    assert (bare.text, bare.status) == (cold.text, cold.status) == (hit.text, hit.status)
    assert tried["hit"], tried
    assert tried["fillers"] > 0
    assert "tokens in L1" in tried["server"]
    assert stats["l1_tokens"] >= hit.cached
    assert stats["prefill_saved_s"] == 0, "SGLang does not tell a storage backend how fast it computes"
    assert "kvframework: started the server" in (tmp_path / "first.log").read_text()
