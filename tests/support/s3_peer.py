"""A small object store in this process that misbehaves as told: for answers that no real server gives on demand."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

Objects = dict[str, tuple[bytes, float]]


@dataclass(frozen=True)
class Answer:
    """An error with a code as S3's, or a body. `says` is its Content-Length if that is another; `drips`: a byte each
    tenth of a second; `silent`: nothing at all."""

    status: int = 200
    code: str = ""
    body: bytes = b""
    says: int | None = None
    drips: bool = False
    silent: bool = False


class S3Peer:
    """Buckets in memory, for requests of S3 and Google's XML API. `script` may answer a request in the store's place:
    (method, path with query) -> Answer or None. `requests` has all, with their headers."""

    def __init__(self, *buckets: str) -> None:
        self.buckets: dict[str, Objects] = {name: {} for name in buckets or ("bucket",)}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.script: Callable[[str, str], Answer | None] = lambda _method, _path: None
        self.stopping = threading.Event()
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def asked(self, method: str) -> list[str]:
        return [path for each, path, _ in self.requests if each == method]

    def __enter__(self) -> S3Peer:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _tag(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'


def _handler(peer: S3Peer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_args: object) -> None:
            pass

        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with peer.lock:
                peer.requests.append((self.command, self.path, dict(self.headers.items())))
            answer = peer.script(self.command, self.path)
            if answer is None:
                with peer.lock:
                    answer, headers = self.stored(body)
            else:
                headers = {"ETag": '"scripted"', "Last-Modified": self.date_time_string()}
            self.send(answer, headers)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = respond  # noqa: N815  as the base class wants them

        def stored(self, body: bytes) -> tuple[Answer, dict[str, str]]:
            parts = urlsplit(self.path)
            bucket, _, name = unquote(parts.path).lstrip("/").partition("/")
            objects = peer.buckets.get(bucket)
            query = parse_qs(parts.query, keep_blank_values=True)
            if objects is None:
                return Answer(404, "NoSuchBucket"), {}
            if "list-type" in query:
                return Answer(body=_listing(objects, query)), {}
            if "delete" in query:
                gone = re.findall(r"<Key>(.*?)</Key>", body.decode())
                for each in gone:
                    objects.pop(each, None)
                told = "".join(f"<Deleted><Key>{each}</Key></Deleted>" for each in gone)
                return Answer(body=f"<DeleteResult>{told}</DeleteResult>".encode()), {}
            held = objects.get(name)
            if self.command == "PUT":
                wanted = self.headers.get("If-Match")
                taken = held is not None and "*" in (self.headers.get("If-None-Match") or "")
                if taken or (wanted is not None and (held is None or _tag(held[0]) != wanted)):
                    return Answer(412, "PreconditionFailed"), {}
                objects[name] = body, time.time()
                return Answer(), {"ETag": _tag(body)}
            if self.command == "DELETE":
                objects.pop(name, None)
                return Answer(204), {}
            if held is None:
                return Answer(404, "NoSuchKey"), {}
            dated = self.date_time_string(held[1])  # type: ignore[arg-type]
            return Answer(body=held[0]), {"ETag": _tag(held[0]), "Last-Modified": dated}

        def send(self, answer: Answer, headers: dict[str, str]) -> None:
            if answer.silent:
                peer.stopping.wait(60)
                self.close_connection = True
                return
            body = answer.body
            if answer.code:
                body = f"<?xml version='1.0'?><Error><Code>{answer.code}</Code><Message>m</Message></Error>".encode()
            self.send_response(answer.status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) if answer.says is None else answer.says))
            self.end_headers()
            try:
                if self.command == "HEAD":
                    return
                if answer.drips:
                    for at in range(len(body)):
                        self.wfile.write(body[at : at + 1])
                        if peer.stopping.wait(0.1):
                            return
                else:
                    self.wfile.write(body)
            except OSError:
                self.close_connection = True
            if answer.says is not None and answer.says != len(body):
                self.close_connection = True

    return Handler


def _listing(objects: Objects, query: dict[str, list[str]]) -> bytes:
    prefix, after = query.get("prefix", [""])[0], query.get("continuation-token", [""])[0]
    most = int(query.get("max-keys", ["1000"])[0])
    names = sorted(name for name in objects if name.startswith(prefix) and name > after)
    more = len(names) > most
    entries = "".join(
        f"<Contents><Key>{name}</Key><Size>{len(objects[name][0])}</Size><ETag>{_tag(objects[name][0])}</ETag>"
        f"<LastModified>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(objects[name][1]))}</LastModified>"
        "</Contents>"
        for name in names[:most]
    )
    token = f"<NextContinuationToken>{names[most - 1]}</NextContinuationToken>" if more else ""
    truncated = f"<IsTruncated>{str(more).lower()}</IsTruncated>"
    return f"<?xml version='1.0'?><ListBucketResult>{truncated}{token}{entries}</ListBucketResult>".encode()
