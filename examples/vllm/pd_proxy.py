"""A proxy for prefill and decode in two vLLM engines that share a kvframework server.

Each completion is first sent to the prefill engine, for one token: that engine stores the prompt's KV. Then it is sent
to the decode engine, which loads that KV, and its answer goes back as it comes. If the prefill engine answers where its
KV lies, as with vLLM's NixlConnector, the decode engine is told and fetches it from there. If the prefill engine does
not answer, the decode engine computes the prompt itself.

python pd_proxy.py --prefill 127.0.0.1:8100 --decode 127.0.0.1:8200 [--port 8000]
"""

from __future__ import annotations

import argparse
import http.client
import json
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# Requests that have a prompt, and so a prefill.
PROMPTS = ("/v1/completions", "/v1/chat/completions")
MAX_BODY_BYTES = 64 << 20
PIECE_BYTES = 64 << 10
# Of an engine or a client that is not there, hangs or speaks otherwise, or of a path that cannot be passed on.
FAILURES = (OSError, http.client.HTTPException, ValueError)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", required=True, help="HOST:PORT of the engine with kv_role kv_producer")
    parser.add_argument("--decode", required=True, help="HOST:PORT of the engine with kv_role kv_consumer")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds without a byte from an engine or a client"
    )
    arguments = parser.parse_args()
    with proxy(arguments.prefill, arguments.decode, arguments.host, arguments.port, arguments.timeout) as server:
        print(f"listening on {arguments.host}:{server.server_address[1]}", flush=True)
        server.serve_forever()


def proxy(
    prefill: str, decode: str, host: str = "127.0.0.1", port: int = 0, timeout: float = 600.0
) -> ThreadingHTTPServer:
    """A server that listens. Each request has a thread; the caller runs it and closes it."""

    class Relay(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._relay(decode, b"")

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or len(length) > len(str(MAX_BODY_BYTES)) or int(length) > MAX_BODY_BYTES:
                self.send_error(413 if length.isdecimal() else 411, f"a body of at most {MAX_BODY_BYTES} bytes")
                return
            body = self.rfile.read(int(length))
            if len(body) < int(length):  # the client hung up
                return
            first = prefill_of(body) if self.path in PROMPTS else b""
            if first:
                body = decode_of(body, self._prefill(first))
            self._relay(decode, body)

        def _prefill(self, body: bytes) -> bytes:
            """The answer of the prefill engine, b"" for none."""
            try:
                with closing(http.client.HTTPConnection(prefill, timeout=timeout)) as connection:
                    reply = self._asked(connection, body)
                    answer = reply.read(MAX_BODY_BYTES)
                if reply.status == 200:
                    return answer
                self.log_error("prefill engine: status %s", reply.status)
            except FAILURES as error:
                self.log_error("prefill engine: %r", error)
            return b""

        def _relay(self, engine: str, body: bytes) -> None:
            # One request a connection: nothing of a client's bytes is taken for a second one.
            self.close_connection = True
            with closing(http.client.HTTPConnection(engine, timeout=timeout)) as connection:
                try:
                    reply = self._asked(connection, body)
                except FAILURES as error:
                    self.send_error(502, f"decode engine: {error!r}")
                    return
                try:
                    self._answer(reply)
                except FAILURES as error:
                    self.log_error("the answer broke off: %r", error)

        def _answer(self, reply: http.client.HTTPResponse) -> None:
            """Pass the answer on as it comes. One that breaks off has no end for the client either."""
            length = reply.getheader("Content-Length")
            in_chunks = length is None and self.request_version != "HTTP/1.0"
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.getheader("Content-Type", "application/json"))
            self.send_header("Connection", "close")
            if length is not None:
                self.send_header("Content-Length", length)
            elif in_chunks:
                self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while piece := reply.read1(PIECE_BYTES):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if in_chunks else piece)
            if in_chunks:
                self.wfile.write(b"0\r\n\r\n")

        def _asked(self, connection: http.client.HTTPConnection, body: bytes) -> http.client.HTTPResponse:
            kept = ("Content-Type", "Authorization", "traceparent", "X-Request-Id")
            headers = {name: self.headers[name] for name in kept if name in self.headers}
            connection.request(self.command, self.path, body or None, headers)
            return connection.getresponse()

    Relay.timeout = timeout
    return ThreadingHTTPServer((host, port), Relay)


def prefill_of(body: bytes) -> bytes:
    """The request for the prefill engine: the same prompt, one token, no stream. b"" for what the decode engine shall
    refuse by itself."""
    request = _object(body)
    if not request:
        return b""
    request = {name: value for name, value in request.items() if name not in ("stream_options", "min_tokens", "n")}
    request |= {"stream": False, "max_tokens": 1}
    if "max_completion_tokens" in request:
        request["max_completion_tokens"] = 1
    return _with_transfer(request, {"do_remote_decode": True})


def decode_of(body: bytes, answer: bytes) -> bytes:
    """The request for the decode engine: the client's, with the place of the KV if the prefill engine names one."""
    place = _object(answer).get("kv_transfer_params")
    return _with_transfer(_object(body), place) if isinstance(place, dict) else body


def _with_transfer(request: dict[str, Any], added: dict[str, Any]) -> bytes:
    given = request.get("kv_transfer_params")
    if given is None or isinstance(given, dict):
        request["kv_transfer_params"] = {**(given or {}), **added}
    return json.dumps(request).encode()


def _object(body: bytes) -> dict[str, Any]:
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


if __name__ == "__main__":
    main()
