"""The answers to HTTP requests: paths, rights, formats. Pure but for the file of the token."""

from __future__ import annotations

import base64
import binascii
import hmac
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import parse_qs

import msgspec

from kvframework.observe import health, page
from kvframework.observe.exposition import OPEN_METRICS, TEXT, exposition
from kvframework.observe.history import History
from kvframework.observe.metrics import NOTHING_TRACED
from kvframework.observe.poller import Observed
from kvframework.observe.settings import is_loopback

PLAIN = "text/plain; charset=utf-8"
JSON = "application/json"
HEADERS = (
    (
        "content-security-policy",
        (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-store"),
)
# Without a token, a caller may ask a probe only whether it passes.
PROBES = ("/livez", "/readyz")
_MOST_FIELDS = 32


class Request(NamedTuple):
    """A request without its body, which no path takes. Names of headers are in lower case."""

    method: str
    target: str
    headers: Mapping[str, str] = {}


class Reply(NamedTuple):
    """An answer. The body of one to HEAD is not sent."""

    status: int
    type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


Query = Mapping[str, list[str]]


class App:
    """`answer` is called by one thread and never waits for the server. `token` reads the token of now, "" for none; it
    raises `OSError`. With `loopback`, names of other hosts are refused: a page of another site that resolves to this
    machine is no reader. `traced` are the counts of `SpanExport`."""

    def __init__(
        self,
        latest: Callable[[], Observed],
        history: History,
        *,
        token: Callable[[], str],
        loopback: bool,
        traced: Mapping[str, int] = NOTHING_TRACED,
    ) -> None:
        self._latest = latest
        self._history = history
        self._token = token
        self._traced = traced
        self._loopback = loopback
        self._files = page.files()
        # The expositions of the last poll, by format: scrapers do not multiply work.
        self._made: dict[bool, tuple[int, bytes]] = {}
        self._routes: dict[str, Callable[[Request, Query], Reply]] = {
            "/metrics": self._metrics,
            "/status": self._status,
            "/history.json": self._points,
            "/livez": self._livez,
            "/readyz": self._readyz,
        }

    def answer(self, request: Request) -> Reply:
        """The answer to any request."""
        path, _, text = request.target.partition("?")
        if request.method not in ("GET", "HEAD"):
            return _refused(HTTPStatus.METHOD_NOT_ALLOWED, ("allow", "GET, HEAD"))
        if self._loopback and not is_loopback(_host(request)):
            return _refused(HTTPStatus.MISDIRECTED_REQUEST)
        try:
            query = parse_qs(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS)
        except ValueError:
            return _refused(HTTPStatus.BAD_REQUEST)
        allowed = self._is_allowed(request)
        if not allowed and path not in PROBES:
            return _refused(HTTPStatus.UNAUTHORIZED, ("www-authenticate", 'Basic realm="kvframework", Bearer'))
        if path in self._files:
            return Reply(HTTPStatus.OK, *self._files[path])
        route = self._routes.get(path)
        if route is None:
            return _refused(HTTPStatus.NOT_FOUND)
        reply = route(request, query)
        return reply if allowed else reply._replace(body=b"ok\n" if reply.status == HTTPStatus.OK else b"failed\n")

    def _metrics(self, request: Request, _query: Query) -> Reply:
        observed = self._latest()
        open_metrics = "application/openmetrics-text" in request.headers.get("accept", "")
        number, text = self._made.get(open_metrics, (-1, b""))
        if number != observed.polls:
            text = exposition(observed, time.monotonic(), self._traced, open_metrics=open_metrics)
            self._made[open_metrics] = (observed.polls, text)
        return Reply(HTTPStatus.OK, OPEN_METRICS if open_metrics else TEXT, text)

    def _status(self, _request: Request, _query: Query) -> Reply:
        observed = self._latest()
        if observed.document is None:
            return Reply(HTTPStatus.SERVICE_UNAVAILABLE, JSON, msgspec.json.encode({"error": observed.error}))
        return Reply(HTTPStatus.OK, JSON, observed.raw)

    def _points(self, _request: Request, query: Query) -> Reply:
        try:
            after = float(query.get("after", ["0"])[-1])
        except ValueError:
            return _refused(HTTPStatus.BAD_REQUEST)
        return Reply(HTTPStatus.OK, JSON, self._history.document(after))

    def _livez(self, _request: Request, query: Query) -> Reply:
        return _probed(health.livez(self._latest(), time.monotonic(), verbose="verbose" in query))

    def _readyz(self, _request: Request, query: Query) -> Reply:
        answer = health.readyz(
            self._latest(),
            time.monotonic(),
            verbose="verbose" in query,
            exclude=query.get("exclude", []),
            require=query.get("require", []),
        )
        return _probed(answer)

    def _is_allowed(self, request: Request) -> bool:
        try:
            token = self._token()
        except OSError:
            return False
        return not token or hmac.compare_digest(_given(request).encode(), token.encode())


def _given(request: Request) -> str:
    """The token of a request: a bearer's, or the password of a browser."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).decode("utf-8", "replace").partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return ""


def _host(request: Request) -> str:
    host = request.headers.get("host", "")
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower().strip("[]")


def _probed(answer: health.Answer) -> Reply:
    status = HTTPStatus.OK if answer.ok else HTTPStatus.SERVICE_UNAVAILABLE
    return Reply(status, PLAIN, answer.text.encode("utf-8", "replace"))


def _refused(status: HTTPStatus, *headers: tuple[str, str]) -> Reply:
    return Reply(status, PLAIN, f"{status.phrase}\n".encode(), headers)
