"""examples/agents: the gateway in front of a stand-in for vLLM, with a real control process and server behind it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.control.control_process import TOKEN, ControlProcess, Engine, prompt
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

GATEWAY = Path(__file__).resolve().parents[2] / "examples" / "agents" / "gateway.py"
pytestmark = pytest.mark.skipif(not GATEWAY.exists(), reason="no checkout")


class Completions(BaseHTTPRequestHandler):
    """Answers with what it was asked."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def gateway(*arguments: str) -> Iterator[str]:
    engine = ThreadingHTTPServer(("127.0.0.1", 0), Completions)
    thread = threading.Thread(target=engine.serve_forever, args=(0.02,))
    thread.start()
    command = [sys.executable, str(GATEWAY), f"http://127.0.0.1:{engine.server_port}", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            engine.shutdown()
            engine.server_close()
            thread.join(20)


def completion(url: str, tokens: list[int], **fields: Any) -> dict[str, Any]:
    body = json.dumps({"prompt": tokens, "max_tokens": 1, **fields}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body), timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def orders(control: ControlProcess) -> list[str]:
    status, listed = control.ask("GET", "/v1/directives")
    assert status == 200
    return [each["do"] for each in listed]


def test_the_gateway_is_short() -> None:
    assert len(GATEWAY.read_text().splitlines()) <= 80


def test_it_says_what_it_knows_and_passes_the_rest_on(tmp_path: Path) -> None:
    tokens = prompt(1, 2)
    with (
        ServerProcess(capacity="4MiB") as server,
        Engine(server) as engine,
        ControlProcess(server, tmp_path) as control,
    ):
        engine.save(tokens)
        with gateway(control.url, str(tmp_path / "token")) as url:
            passed = completion(url, tokens, conversation="a", next_s=5, begins=True)
            assert passed == {"prompt": tokens, "max_tokens": 1}
            completion(url, tokens, conversation="a", next_s=None)
            wait_until(lambda: orders(control) == ["prefetch", "turn", "turn", "end"], what="all orders")
        with gateway(control.url, str(tmp_path / "token"), "--no-hints") as url:
            completion(url, tokens, conversation="b", next_s=5, begins=True)
            assert len(orders(control)) == 4


def test_without_a_control_process_requests_are_answered(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    with gateway("http://127.0.0.1:9", str(tmp_path / "token")) as url:
        assert completion(url, [1], conversation="a", begins=True)["prompt"] == [1]
