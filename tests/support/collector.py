"""A collector of traces for tests: OTLP over HTTP, decoded from protobuf, kept in memory."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Received(NamedTuple):
    """A span, with its attributes, those of its resource, and the time in seconds."""

    span: Span
    attributes: dict[str, object]
    resource: dict[str, object]

    @property
    def name(self) -> str:
        return str(self.span.name)

    @property
    def trace(self) -> str:
        return self.span.trace_id.hex()

    @property
    def id(self) -> str:
        return self.span.span_id.hex()

    @property
    def parent(self) -> str:
        return self.span.parent_span_id.hex()


class Collector:
    """A context manager, at `url`. While `status` is not 200 it refuses what comes; between `hold` and its end nothing
    is answered. `requests` counts the requests, `headers` are those of the last one."""

    def __init__(self) -> None:
        self.status = 200
        self.requests = 0
        self.headers: dict[str, str] = {}
        self.spans: list[Received] = []
        self._open = threading.Event()
        self._open.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector._took(self.path, dict(self.headers), body)
                collector._open.wait()
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()
        self._server.shutdown()
        self._server.server_close()

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def named(self, name: str) -> list[Received]:
        return [each for each in self.spans if each.name == name]

    def _took(self, path: str, headers: dict[str, str], body: bytes) -> None:
        assert path == "/v1/traces"
        self.headers = {name.lower(): value for name, value in headers.items()}
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        if self.status == 200:
            for each in request.resource_spans:
                resource = _values(each.resource.attributes)
                for scope in each.scope_spans:
                    self.spans += [Received(span, _values(span.attributes), resource) for span in scope.spans]
        self.requests += 1


def _values(attributes: object) -> dict[str, object]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}  # type: ignore[attr-defined]
