"""A gateway of agents in front of vLLM: it says what it knows of conversations to `kvframework control`.

    python gateway.py http://127.0.0.1:8000 http://127.0.0.1:9320 TOKEN_FILE [--no-hints]

`POST /v1/completions` is vLLM's, with a prompt of token ids and three fields more: `conversation`, `next_s`, in which
its next turn is expected (without it the conversation ends), and `begins`. No request waits for an order.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ENGINE_S, ORDER_S, LATER_S = 300.0, 5.0, 30.0  # a turn may come later than announced


def posted(url: str, body: dict[str, Any], timeout_s: float, **headers: str) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return bytes(answer.read())


class Control:
    """Orders, one after the other, in a thread."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token
        self._thread = ThreadPoolExecutor(1)

    def order(self, path: str, **body: Any) -> None:
        self._thread.submit(self._send, f"{self._url}/v1/{path}", body)

    def _send(self, url: str, body: dict[str, Any]) -> None:
        try:
            posted(url, body, ORDER_S, authorization=f"Bearer {self._token}")
        except OSError as error:
            print(f"an order failed: {error}", flush=True)


class Gateway(BaseHTTPRequestHandler):
    engine: str
    control: Control | None

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        name, next_s, begins = body.pop("conversation"), body.pop("next_s", None), body.pop("begins", False)
        tokens = body["prompt"]
        if self.control and begins:
            self.control.order("prefetch", tokens=tokens)
        answer = posted(self.engine + self.path, body, ENGINE_S)
        if self.control and next_s is not None:
            self.control.order(f"conversations/{name}/turn", tokens=tokens, seconds=next_s + LATER_S)
        elif self.control:
            self.control.order(f"conversations/{name}/turn", tokens=tokens, seconds=1)
            self.control.order(f"conversations/{name}/end")
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a gateway that announces turns and ends of conversations")
    for name in ("engine", "control", "token_file"):
        parser.add_argument(name)
    parser.add_argument("--no-hints", action="store_true", help="only pass requests on")
    given = parser.parse_args()
    Gateway.engine = given.engine
    Gateway.control = None if given.no_hints else Control(given.control, Path(given.token_file).read_text().strip())
    server = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
