"""`kvframework try` against an OpenAI interface over HTTP: what it sends, and its verdicts with their reasons. A real
engine behind it is in tests/vllm/test_run_command.py."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvf_run.openai import OpenAI, Reply
from kvf_run.try_out import judged, text_of
from kvframework.errors import EndpointError
from tests.support.tls_proxy import TlsProxy


class Engine(ThreadingHTTPServer):
    """Finds what it has seen, up to `remembers` prompts; `reports` says whether it tells."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.remembers, self.reports, self.key = 100, True, ""
        self.prompts: list[str] = []
        self.resets = 0
        self.metrics = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="20"} 1.0'

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer(json.dumps({"data": [{"id": "tiny"}]}).encode())
        elif self.path == "/metrics":
            self.answer(self.server.metrics)
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self.send_error(401)
        elif self.path == "/flush_cache":
            self.server.resets += 1
            self.answer(b"{}")
        elif self.path == "/v1/completions":
            prompt = body["prompt"]
            cached = len(prompt) // 4 if prompt in self.server.prompts[-self.server.remembers :] else 0
            self.server.prompts.append(prompt)
            usage: dict[str, Any] = {"prompt_tokens": len(prompt) // 4}
            if self.server.reports:
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
            events = {"choices": [{"text": "x"}]}, {"choices": [], "usage": usage}
            sent = b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events)
            self.answer(sent + b"data: [DONE]\n")
        else:
            self.send_error(404)

    def answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        try:
            yield served
        finally:
            served.shutdown()
            thread.join()


def tried(*words: str, code: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvframework", "try", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done


def test_a_hit_after_fillers(engine: Engine) -> None:
    verdict = json.loads(tried("--url", engine.url, "--json", code=0).stdout)
    assert verdict["hit"]
    assert verdict["fillers"] >= 1
    assert engine.prompts[0] == engine.prompts[-1]
    assert len(set(engine.prompts)) == verdict["fillers"] + 1


def test_fillers_go_beyond_the_host_cache_of_sglang(engine: Engine) -> None:
    engine.metrics = b'sglang:max_total_num_tokens{a="b"} 320.0\nsglang:hicache_host_total_tokens{a="b"} 1000.0\n'
    assert OpenAI(engine.url).capacity_tokens() == 1320


def test_a_miss_says_why(engine: Engine) -> None:
    engine.remembers = 1
    done = tried("--url", f"{engine.url}/v1/", code=1)
    assert "no token of the prompt was found" in done.stdout


def test_an_engine_that_reports_nothing_is_named(engine: Engine) -> None:
    engine.reports = False
    assert "--enable-prompt-tokens-details" in tried("--url", engine.url, code=1).stdout


def test_a_reset_is_asked_for_and_takes_the_path_that_the_engine_has(engine: Engine) -> None:
    assert "--yes" in tried("--url", engine.url, "--reset", code=2).stderr
    assert engine.prompts == []
    tried("--url", engine.url, "--reset", "--yes", code=0)
    assert engine.resets == 1
    assert len(engine.prompts) == 2


def test_a_key_that_is_wrong_is_named(engine: Engine) -> None:
    engine.key = "secret"
    assert "--api-key-file" in tried("--url", engine.url, "--model", "tiny", code=2).stderr


def test_a_gateway_with_tls_and_a_key(engine: Engine, tmp_path: Path) -> None:
    engine.key = "secret"
    (tmp_path / "key").write_text("secret\n")
    with TlsProxy(tmp_path, engine.server_address[1]) as gateway:
        url = f"https://localhost:{gateway.port}/v1"
        trusting = "--url", url, "--cafile", str(gateway.certificate), "--api-key-file", str(tmp_path / "key")
        assert json.loads(tried(*trusting, "--json", code=0).stdout)["hit"]
        assert "certificate verify failed" in tried("--url", url, code=2).stderr


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://here", "http://127.0.0.1:1"])
def test_what_is_no_engine_is_an_error(url: str) -> None:
    with pytest.raises(EndpointError):
        OpenAI(url, timeout_s=5).model()


def test_a_different_answer_is_no_hit() -> None:
    cold, again = Reply(1.0, 100, 0, "a"), Reply(0.1, 100, 96, "b")
    assert "differ" in judged(cold, again, 0, "").reason
    assert not judged(cold, again, 0, "").hit
    assert judged(cold, again._replace(text="a"), 0, "").hit


def test_a_prompt_is_new() -> None:
    chance = random.Random(1)
    assert text_of(500, chance) != text_of(500, chance)
