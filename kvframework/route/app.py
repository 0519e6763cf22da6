"""The answers to HTTP requests: scores, health, metrics, what is known of the publishers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated

import msgspec

from kvframework.api.hasher import DIGEST_BYTES
from kvframework.histogram import Histogram
from kvframework.http.exposition import OPEN_METRICS, TEXT, wants_open_metrics
from kvframework.http.messages import JSON, PLAIN, Reply, Request, refused
from kvframework.http.rights import CHALLENGE, Rights
from kvframework.route import prefix_hashes
from kvframework.route.events import MOST_BLOCK_TOKENS
from kvframework.route.metrics import exposition
from kvframework.route.router import Router
from kvframework.route.scoring import Scoring

MOST_BODY = 8 << 20
MOST_TOKENS = 1 << 20
PROBES = ("/livez", "/readyz")
# Scores that are computed at a time: the others wait, so that events always have their part of the loop.
MOST_SCORING = 4

Text = Annotated[str, msgspec.Meta(max_length=1024)]
Token = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]


class ScoreRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /score`: `tokens`, or hexadecimal `digests` of kvframework's chunks of `chunk_tokens` tokens.
    `adapter` is the LoRA's name. Without a model, blocks of every model count."""

    tokens: Annotated[list[Token], msgspec.Meta(max_length=MOST_TOKENS)] | None = None
    digests: Annotated[list[str], msgspec.Meta(max_length=MOST_TOKENS // 16)] | None = None
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_BLOCK_TOKENS)] = 256
    model: Text | None = None
    salt: Text = ""
    adapter: Text = ""


class App:
    """`answer` is called in the router's event loop; no step of an answer takes longer than some milliseconds."""

    def __init__(self, router: Router, rights: Rights) -> None:
        self._router = router
        self._rights = rights
        self._requests = self._refused = 0
        self._scoring = asyncio.Semaphore(MOST_SCORING)
        self._durations = Histogram(2.0**-14, 16)
        self._decode = msgspec.json.Decoder(ScoreRequest).decode
        self._routes: dict[str, tuple[str, Callable[[Request], Reply | Awaitable[Reply]]]] = {
            "/score": ("POST", self._score),
            "/publishers": ("GET", self._publishers),
            "/metrics": ("GET", self._metrics),
            "/livez": ("GET", lambda _: Reply(HTTPStatus.OK, PLAIN, b"ok\n")),
            "/readyz": ("GET", self._readyz),
        }

    def answer(self, request: Request) -> Reply | Awaitable[Reply]:
        """The answer to any request."""
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

    async def _score(self, request: Request) -> Reply:
        began = time.perf_counter()
        try:
            scoring = self._begin(self._decode(request.body))
            async with self._scoring:
                while (scores := next(scoring, None)) is None:
                    await asyncio.sleep(0)
        except (msgspec.MsgspecError, OverflowError, ValueError) as error:
            self._refused += 1
            return Reply(HTTPStatus.BAD_REQUEST, JSON, msgspec.json.encode({"error": str(error)}))
        self._requests += 1
        self._durations.add(time.perf_counter() - began)
        return Reply(HTTPStatus.OK, JSON, msgspec.json.encode(scores))

    def _begin(self, asked: ScoreRequest) -> Scoring:
        """Raises `ValueError` and `OverflowError`."""
        if (asked.tokens is None) == (asked.digests is None):
            raise ValueError("a request has either tokens or digests")
        if asked.tokens is not None:
            packed = prefix_hashes.packed(asked.tokens)
            return self._router.score_tokens(packed, asked.model, asked.salt, asked.adapter)
        if asked.model is None:
            raise ValueError("a request with digests names its model")
        named = [bytes.fromhex(each) for each in asked.digests or ()]
        if any(len(each) != DIGEST_BYTES for each in named):
            raise ValueError(f"a digest has {DIGEST_BYTES} bytes, {2 * DIGEST_BYTES} digits")
        return self._router.score_digests(b"".join(named), asked.chunk_tokens, asked.model, asked.salt, asked.adapter)

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
