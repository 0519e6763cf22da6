"""The proxy of examples/vllm for prefill and decode, between engines that are plain HTTP servers."""

from __future__ import annotations

import http.client
import importlib.util
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "vllm" / "pd_proxy.py"


def loaded() -> Any:
    spec = importlib.util.spec_from_file_location("pd_proxy", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pd_proxy = loaded()


class Engine:
    """Answers with its name, in two pieces; remembers what it was asked. `status` 0: hangs up. `framing` is how it says
    where its answer ends; an answer that is `cut` ends before."""

    def __init__(self, name: str, status: int = 200, *, framing: str = "length", cut: bool = False) -> None:
        self.asked: list[tuple[str, Any, str]] = []
        engine = self

        class Handler(BaseHTTPRequestHandler):
            # Connections stay open, as vLLM's do, until the proxy closes them.
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                text = json.loads(body) if body.startswith(b"{") else body.decode()
                engine.asked.append((self.path, text, self.headers.get("Authorization", "")))
                if not status:
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Type", "text/event-stream")
                in_chunks = framing == "chunks"
                self.send_header(
                    *(("Transfer-Encoding", "chunked") if in_chunks else ("Content-Length", str(len(name) + 1)))
                )
                self.end_headers()
                for piece in (name, "!", "")[: 1 if cut else None]:
                    self.wfile.write((f"{len(piece):x}\r\n{piece}\r\n" if in_chunks else piece).encode())
                    self.wfile.flush()
                self.close_connection = cut

            def do_GET(self) -> None:
                text = f"{name} at {self.path}".encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_arguments: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.server.server_address[1]}"


@contextmanager
def running(*servers: HTTPServer) -> Iterator[None]:
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join(20)


def asked(
    proxy: ThreadingHTTPServer, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, str, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", proxy.server_address[1], timeout=60)) as connection:
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read().decode(), reply.getheader("Content-Type", "")


def test_a_prompt_is_prefilled_with_one_token_and_answered_by_the_other() -> None:
    prefill, decode = Engine("prefill"), Engine("decode")
    proxy = pd_proxy.proxy(prefill.place, decode.place)
    request = {"prompt": [1, 2], "max_tokens": 50, "stream": True, "stream_options": {}, "cache_salt": "s", "n": 2}
    with running(prefill.server, decode.server, proxy):
        answer = asked(proxy, "POST", "/v1/completions", json.dumps(request).encode(), Authorization="Bearer t")
        assert asked(proxy, "GET", "/v1/models")[1] == "decode at /v1/models"
        assert asked(proxy, "POST", "/tokenize", b"{}")[0] == 200
    assert answer == (200, "decode!", "text/event-stream")
    one = {"prompt": [1, 2], "max_tokens": 1, "stream": False, "cache_salt": "s"}
    one["kv_transfer_params"] = {"do_remote_decode": True}
    assert prefill.asked == [("/v1/completions", one, "Bearer t")]
    assert decode.asked == [("/v1/completions", request, "Bearer t"), ("/tokenize", {}, "")]


def test_the_decode_engine_is_told_where_the_prefill_engine_keeps_the_kv() -> None:
    request = {"prompt": "a", "kv_transfer_params": {"kvframework.salt": "s"}}
    place = {"do_remote_prefill": True, "remote_block_ids": [[3]], "remote_port": 5600}
    body = json.dumps(request).encode()
    told = pd_proxy.decode_of(body, json.dumps({"choices": [], "kv_transfer_params": place}).encode())
    assert json.loads(told) == {"prompt": "a", "kv_transfer_params": {"kvframework.salt": "s", **place}}
    for answer in (b"", b"[1]", b'{"kv_transfer_params": null}', b'{"kv_transfer_params": [1]}', b"{", b"[" * 100_000):
        assert pd_proxy.decode_of(body, answer) == body
    asked = json.loads(pd_proxy.prefill_of(body))["kv_transfer_params"]
    assert asked == {"kvframework.salt": "s", "do_remote_decode": True}
    # What is no object is left to the engines to refuse.
    assert json.loads(pd_proxy.prefill_of(b'{"prompt": "a", "kv_transfer_params": 7}'))["kv_transfer_params"] == 7


@pytest.mark.parametrize("status", [500, 0])
def test_without_the_prefill_engine_the_other_computes(status: int, capfd: pytest.CaptureFixture[str]) -> None:
    prefill, decode = Engine("prefill", status), Engine("decode")
    proxy = pd_proxy.proxy(prefill.place, decode.place)
    with running(prefill.server, decode.server, proxy):
        assert asked(proxy, "POST", "/v1/completions", b'{"prompt": "a"}')[1] == "decode!"
    assert len(prefill.asked) == 1
    assert "prefill engine" in capfd.readouterr().err


def test_without_the_decode_engine_there_is_no_answer() -> None:
    prefill, decode = Engine("prefill"), Engine("decode", 0)
    proxy = pd_proxy.proxy(prefill.place, decode.place)
    with running(prefill.server, decode.server, proxy):
        status, text, _ = asked(proxy, "POST", "/v1/completions", b'{"prompt": "a"}')
    assert status == 502
    assert "decode engine" in text


@pytest.mark.parametrize("body", [b"", b"no json", b"[1]", b"[" * 100_000])
def test_what_is_no_request_is_the_decode_engines_to_refuse(body: bytes) -> None:
    prefill, decode = Engine("prefill"), Engine("decode", 400)
    proxy = pd_proxy.proxy(prefill.place, decode.place)
    with running(prefill.server, decode.server, proxy):
        assert asked(proxy, "POST", "/v1/completions", body)[0] == 400
    assert not prefill.asked


def test_bodies_without_end_are_refused() -> None:
    engine = Engine("any")
    proxy = pd_proxy.proxy(engine.place, engine.place)
    with running(engine.server, proxy):
        connection = http.client.HTTPConnection("127.0.0.1", proxy.server_address[1], timeout=60)
        for length, status in ((str(1 << 40), 413), ("9" * 5000, 413), ("many", 411)):
            connection.putrequest("POST", "/v1/completions")
            connection.putheader("Content-Length", length)
            connection.endheaders()
            assert connection.getresponse().status == status
            connection.close()
    assert not engine.asked


@pytest.mark.parametrize("framing", ["length", "chunks"])
@pytest.mark.parametrize("cut", [False, True])
def test_an_answer_that_breaks_off_does_not_look_whole(
    framing: str, cut: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    prefill, decode = Engine("prefill"), Engine("decode", framing=framing, cut=cut)
    proxy = pd_proxy.proxy(prefill.place, decode.place)
    with running(prefill.server, decode.server, proxy):
        if cut:
            with pytest.raises(http.client.IncompleteRead):
                asked(proxy, "POST", "/v1/completions", b'{"prompt": "a"}')
        else:
            assert asked(proxy, "POST", "/v1/completions", b'{"prompt": "a"}')[1] == "decode!"
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "sent",
    [
        b'POST /v1/completions HTTP/1.1\r\nContent-Length: 1000\r\n\r\n{"prompt": "a"}',
        b"POST /v1/\xe9 HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
        b"GET /v1/models HTTP/1.1\r\n\r\nGET /secret HTTP/1.1\r\n\r\n",
    ],
    ids=["a body that ends before", "a path beyond ASCII", "two requests at once"],
)
def test_what_clients_send_harms_neither_proxy_nor_engines(sent: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    engine = Engine("any")
    proxy = pd_proxy.proxy(engine.place, engine.place)
    with running(engine.server, proxy), socket.create_connection(("127.0.0.1", proxy.server_address[1]), 60) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert b"secret" not in answer
    assert not engine.asked
    assert "Traceback" not in capfd.readouterr().err
