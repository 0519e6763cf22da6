"""The answers to HTTP requests: paths and formats. Pure but for the file of the token."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from urllib.parse import parse_qs

import msgspec

from kvf_observe import health, page
from kvf_observe.http import exposition as http_exposition
from kvf_observe.http.exposition import OPEN_METRICS, TEXT, wants_open_metrics
from kvf_observe.http.messages import CHALLENGE, JSON, PLAIN, Reply, Request, Rights, refused
from kvf_observe.metrics import METRICS, NOTHING_TRACED, OWN, own_document
from kvf_observe.poller import History, Observed

# Without a token, a caller may ask a probe only whether it passes.
PROBES = ("/livez", "/readyz")
_MOST_FIELDS = 32
Query = Mapping[str, list[str]]


def exposition(
    observed: Observed, now: float, traced: Mapping[str, int] = NOTHING_TRACED, *, open_metrics: bool
) -> bytes:
    """All families. Without a status document only those of `OWN`: the others' series end, and go on with the server.

    A counter of a server that could not be asked would otherwise seem to fall to 0 and to grow by all it had."""
    own = own_document(observed, now, traced)
    metrics = OWN if observed.document is None else METRICS
    documents = (own if metric in OWN else observed.document or {} for metric in metrics)
    return http_exposition.exposition(zip(metrics, documents, strict=True), open_metrics=open_metrics)


class App:
    """`answer` is called by one thread and never waits for the server. `traced` are the counts of `SpanExport`."""

    def __init__(
        self,
        latest: Callable[[], Observed],
        history: History,
        *,
        rights: Rights,
        traced: Mapping[str, int] = NOTHING_TRACED,
    ) -> None:
        self._latest = latest
        self._history = history
        self._rights = rights
        self._traced = traced
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
            return refused(HTTPStatus.METHOD_NOT_ALLOWED, ("allow", "GET, HEAD"))
        if not self._rights.is_here(request):
            return refused(HTTPStatus.MISDIRECTED_REQUEST)
        try:
            query = parse_qs(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS)
        except ValueError:
            return refused(HTTPStatus.BAD_REQUEST)
        allowed = self._rights.is_allowed(request)
        if not allowed and path not in PROBES:
            return refused(HTTPStatus.UNAUTHORIZED, CHALLENGE)
        if path in self._files:
            return Reply(HTTPStatus.OK, *self._files[path])
        route = self._routes.get(path)
        if route is None:
            return refused(HTTPStatus.NOT_FOUND)
        reply = route(request, query)
        return reply if allowed else reply._replace(body=b"ok\n" if reply.status == HTTPStatus.OK else b"failed\n")

    def _metrics(self, request: Request, _query: Query) -> Reply:
        observed = self._latest()
        open_metrics = wants_open_metrics(request.headers.get("accept", ""))
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
            return refused(HTTPStatus.BAD_REQUEST)
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


def _probed(answer: health.Answer) -> Reply:
    status = HTTPStatus.OK if answer.ok else HTTPStatus.SERVICE_UNAVAILABLE
    return Reply(status, PLAIN, answer.text.encode("utf-8", "replace"))
