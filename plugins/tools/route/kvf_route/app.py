"""The answers to HTTP requests: scores, health, metrics, what is known of the publishers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus

import msgspec

from kvf_observe.http.exposition import OPEN_METRICS, TEXT, wants_open_metrics
from kvf_observe.http.messages import JSON, PLAIN, Answer, Reply, Request, WantsBody, refused
from kvf_observe.http.rights import CHALLENGE, Rights
from kvf_route.metrics import exposition
from kvf_route.router import Router
from kvf_route.score_request import scoring_of
from kvframework.histogram import Histogram

# A million tokens.
MOST_BODY = 8 << 20
# Of an error, which may repeat what was sent.
MOST_SAID = 300
PROBES = ("/livez", "/readyz")


class App:
    """`answer` is called in the router's event loop. Scores take turns in steps of some milliseconds, one in each round
    of the loop: probes, events and short prompts never wait for a long one."""

    def __init__(self, router: Router, rights: Rights) -> None:
        self._router = router
        self._rights = rights
        self._requests = self._refused = 0
        self._turn = asyncio.Lock()
        self._durations = Histogram(2.0**-14, 16)
        self._routes: dict[str, tuple[str, Callable[[Request], Answer]]] = {
            "/score": ("POST", lambda _: WantsBody(MOST_BODY, self._score)),
            "/publishers": ("GET", self._publishers),
            "/metrics": ("GET", self._metrics),
            "/livez": ("GET", lambda _: Reply(HTTPStatus.OK, PLAIN, b"ok\n")),
            "/readyz": ("GET", self._readyz),
        }

    def answer(self, request: Request) -> Answer:
        """The answer to the head of any request."""
        path = request.target.partition("?")[0]
        if not self._rights.is_here(request):
            return refused(HTTPStatus.MISDIRECTED_REQUEST)
        if path not in PROBES and not self._rights.is_allowed(request):
            return refused(HTTPStatus.UNAUTHORIZED, CHALLENGE)
        if path not in self._routes:
            return refused(HTTPStatus.NOT_FOUND)
        method, route = self._routes[path]
        if request.method != method and (request.method, method) != ("HEAD", "GET"):
            return refused(HTTPStatus.METHOD_NOT_ALLOWED, ("allow", method))
        return route(request)

    async def _score(self, body: bytearray) -> Reply:
        began = time.perf_counter()
        steps, scores = scoring_of(body, self._router), None
        try:
            while scores is None:
                async with self._turn:
                    scores = next(steps)
                    await asyncio.sleep(0)
        except (msgspec.MsgspecError, OverflowError, RecursionError, ValueError) as error:
            self._refused += 1
            return Reply(HTTPStatus.BAD_REQUEST, JSON, msgspec.json.encode({"error": str(error)[:MOST_SAID]}))
        self._requests += 1
        self._durations.add(time.perf_counter() - began)
        return Reply(HTTPStatus.OK, JSON, msgspec.json.encode(scores))

    def _publishers(self, _request: Request) -> Reply:
        return Reply(HTTPStatus.OK, JSON, msgspec.json.encode(self._router.document()))

    def _readyz(self, request: Request) -> Reply:
        """Ready once every publisher that is there was heard to the end: until then scores are too low."""
        waiting = self._router.waiting_for
        said = "".join(f"[-]{each} is not heard to the end\n" for each in waiting)
        verbose = "verbose" in request.target.partition("?")[2] and self._rights.is_allowed(request)
        status = HTTPStatus.SERVICE_UNAVAILABLE if waiting else HTTPStatus.OK
        return Reply(status, PLAIN, (said if verbose and said else "failed\n" if waiting else "ok\n").encode())

    def _metrics(self, request: Request) -> Reply:
        open_metrics = wants_open_metrics(request.headers.get("accept", ""))
        own = {
            "requests": self._requests,
            "refused_requests": self._refused,
            "score_s": self._durations.octaves(),
        }
        text = exposition(self._router.document() | own, open_metrics=open_metrics)
        return Reply(HTTPStatus.OK, OPEN_METRICS if open_metrics else TEXT, text)
