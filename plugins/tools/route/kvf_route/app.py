"""The answers to HTTP requests: scores, health, metrics, what is known of the publishers; and the process that gives
them: one event loop that follows publishers and answers, until a signal.

Metrics are read from `Router.document`. Their labels are endpoints, which the router's own configuration names; never a
salt, a token or a text of a publisher.

The body of `POST /score`, read in steps. Pure.

To decode a million tokens at once takes 50 ms, in which nothing else is answered, and 40 MB. A first pass, 6 times as
quick, only finds where the list is; its parts are decoded one by one.
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

import msgspec

from kvf_observe.http.exposition import (
    OPEN_METRICS,
    TEXT,
    Document,
    Labels,
    Metric,
    Reader,
    Type,
    exposition,
    wants_open_metrics,
)
from kvf_observe.http.listener import Listener, listen_until_signal
from kvf_observe.http.messages import (
    CHALLENGE,
    JSON,
    PLAIN,
    Answer,
    Reply,
    Request,
    Rights,
    WantsBody,
    is_loopback,
    read_token,
    refusals,
    refused,
    tls_context,
)
from kvf_route import prefix_hashes
from kvf_route.events import MOST_BLOCK_TOKENS
from kvf_route.router import Router
from kvf_route.scoring import Scoring
from kvf_route.settings import Node, RouteConfig, read_nodes
from kvframework.api.counter import Histogram
from kvframework.api.endpoint import parse_listen
from kvframework.api.hasher import DIGEST_BYTES
from kvframework.errors import KVFrameworkError

log = logging.getLogger(__name__)

WHERE = "kvframework route"
_NODE = ("publisher",)
# A million tokens.
MOST_BODY = 8 << 20
# Of an error, which may repeat what was sent.
MOST_SAID = 300
PROBES = ("/livez", "/readyz")


def _each(read: Callable[[Any], Any]) -> Reader:
    def rows(document: Document) -> Iterator[tuple[Labels, Any]]:
        for publisher in document["publishers"]:
            yield (_name(publisher),), read(publisher)

    return rows


def _by(field: str) -> Reader:
    def rows(document: Document) -> Iterator[tuple[Labels, Any]]:
        for publisher in document["publishers"]:
            for name, number in publisher[field].items():
                yield (_name(publisher), name), number

    return rows


def _name(publisher: Document) -> str:
    """The endpoint; with the topic where only that counts."""
    return " ".join(filter(None, (publisher["events"], publisher["topic"])))


def _whole(field: str) -> Reader:
    return lambda document: iter([((), document[field])])


def _metric(name: str, kind: Type, help_: str, read: Reader, labels: Labels = _NODE) -> Metric:
    return Metric(f"route_{name}", kind, help_, "", read, labels)


METRICS = (
    _metric("connected", "gauge", "whether the node's publisher is connected", _each(lambda each: each["connected"])),
    _metric("in_step", "gauge", "whether all announced blocks are in the index", _each(lambda each: each["in_step"])),
    _metric("blocks", "gauge", "blocks that the node holds", _each(lambda each: each["blocks"])),
    _metric("batches_total", "counter", "batches of events received", _each(lambda each: each["batches"])),
    _metric("lost_batches_total", "counter", "batches of events lost", _each(lambda each: each["lost_batches"])),
    _metric(
        "forgotten_total",
        "counter",
        "times that all blocks of the node were forgotten",
        _each(lambda each: each["forgotten"]),
    ),
    _metric(
        "failed_replays_total",
        "counter",
        "replay requests without an answer",
        _each(lambda each: each["failed_replays"]),
    ),
    _metric("odd_events_total", "counter", "events without a block", _by("events_by_kind"), ("publisher", "kind")),
    _metric(
        "announced_blocks_total",
        "counter",
        "announced blocks, by outcome",
        _by("blocks_by_fate"),
        ("publisher", "fate"),
    ),
    _metric("index_blocks", "gauge", "blocks in the index, counted per place", _whole("blocks"), ()),
    _metric("index_most_blocks", "gauge", "capacity of the index, in blocks", _whole("most_blocks"), ()),
    _metric("index_bytes", "gauge", "memory of a full index", _whole("index_bytes"), ()),
    _metric("requests_total", "counter", "score requests", _whole("requests"), ()),
    _metric("refused_requests_total", "counter", "malformed requests", _whole("refused_requests"), ()),
    _metric("score_seconds", "histogram", "time to compute a score", _whole("score_s"), ()),
)


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
        said = "".join(f"[-]{each} has events that are not received yet\n" for each in waiting)
        verbose = "verbose" in request.target.partition("?")[2] and self._rights.is_allowed(request)
        status = HTTPStatus.SERVICE_UNAVAILABLE if waiting else HTTPStatus.OK
        return Reply(status, PLAIN, (said if verbose and said else "failed\n" if waiting else "ok\n").encode())

    def _metrics(self, request: Request) -> Reply:
        open_metrics = wants_open_metrics(request.headers.get("accept", ""))
        own = {"requests": self._requests, "refused_requests": self._refused, "score_s": self._durations.octaves()}
        document = self._router.document() | own
        text = exposition(((metric, document) for metric in METRICS), open_metrics=open_metrics)
        return Reply(HTTPStatus.OK, OPEN_METRICS if open_metrics else TEXT, text)


def check(config: RouteConfig) -> None:
    """Raise the first error with which `route` would refuse to start, if there is one. Blocking."""
    read_nodes(config)
    for refusal in refusals(config, WHERE):
        raise refusal


def route(config: RouteConfig) -> None:
    """Follow and answer until SIGINT or SIGTERM; SIGHUP reads the file of nodes again. In the main thread, after
    `check`. Raises `ConfigError`, also of what has changed since."""
    asyncio.run(_run(config, read_nodes(config)))


async def _run(config: RouteConfig, nodes: list[Node]) -> None:
    router = Router(config.blocks, config.client_key)
    router.follow(nodes)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _read_again, router, config)
    host, _ = parse_listen(config.listen)
    app = App(router, Rights(partial(read_token, config), loopback=is_loopback(host)))
    listener = Listener(app.answer, tls=tls_context(config))
    log.info(
        "%d nodes; the index has room for %d blocks in %d MB", len(nodes), config.blocks, router.index.bytes // 10**6
    )
    try:
        await listen_until_signal(listener, config, WHERE, "scores")
    finally:
        await router.stop()


def _read_again(router: Router, config: RouteConfig) -> None:
    """A file with a mistake changes nothing."""
    try:
        nodes = read_nodes(config)
        router.follow(nodes)
    except KVFrameworkError as error:
        log.error("the list of nodes is unchanged, because the file is wrong: %s", error)
        return
    log.info("read the list of nodes again: %d nodes", len(nodes))


MOST_TOKENS = 1 << 20
MOST_DIGESTS = MOST_TOKENS // 16
# Of a list's text, decoded in one step: about half a millisecond.
_PART = 1 << 15
_COMMA = re.compile(b",")
_PLACE = re.compile(r"`\$\[(\d+)\]`")

Text = Annotated[str, msgspec.Meta(max_length=1024)]
Token = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
V = TypeVar("V")

_ABSENT = msgspec.Raw(b"null")
_tokens = msgspec.json.Decoder(list[Token]).decode
_digests = msgspec.json.Decoder(list[str]).decode


class ScoreRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /score`: `tokens`, or hexadecimal `digests` of kvframework's chunks of `chunk_tokens` tokens.
    `adapter` is the LoRA's name. Without a model, blocks of every model count."""

    tokens: msgspec.Raw = _ABSENT
    digests: msgspec.Raw = _ABSENT
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_BLOCK_TOKENS)] = 256
    model: Text | None = None
    salt: Text = ""
    adapter: Text = ""


_asked = msgspec.json.Decoder(ScoreRequest).decode


def scoring_of(body: bytearray, router: Router) -> Scoring:
    """The score that a body asks for, in steps of some milliseconds. A step raises `msgspec.MsgspecError`,
    `ValueError`, `OverflowError` or `RecursionError` for a body that is no request."""
    asked = _asked(body)
    yield None
    if _is_given(asked.tokens) == _is_given(asked.digests):
        raise ValueError("a request needs tokens or digests, not both")
    packed = bytearray()
    if _is_given(asked.tokens):
        for tokens in _parts("tokens", asked.tokens, _tokens, MOST_TOKENS):
            packed += prefix_hashes.packed(tokens)
            yield None
        yield from router.score_tokens(bytes(packed), asked.model, asked.salt, asked.adapter)
        return
    if asked.model is None:
        raise ValueError("a request with digests needs `model`")
    for digests in _parts("digests", asked.digests, _digests, MOST_DIGESTS):
        named = [bytes.fromhex(each) for each in digests]
        if any(len(each) != DIGEST_BYTES for each in named):
            raise ValueError(f"a digest has {DIGEST_BYTES} bytes, {2 * DIGEST_BYTES} digits")
        packed += b"".join(named)
        yield None
    yield from router.score_digests(bytes(packed), asked.chunk_tokens, asked.model, asked.salt, asked.adapter)


def _is_given(value: msgspec.Raw) -> bool:
    return bytes(memoryview(value)[:5]) != b"null"


def _parts(field: str, value: msgspec.Raw, decode: Callable[[bytes], list[V]], most: int) -> Iterator[list[V]]:
    """The values of a flat array, part by part. What is cut at a comma within a string, or within a list, is no
    array: no such cut goes unnoticed."""
    text, count = memoryview(value), 0
    if bytes(text[:1]) != b"[":
        text = memoryview(b"[]")
        _decoded(field, 0, decode, bytes(value))
    at, last = 1, len(text) - 1
    while at <= last:
        comma = _COMMA.search(text, at + _PART, last)
        end = comma.start() if comma else last
        values = _decoded(field, count, decode, b"".join((b"[", text[at:end], b"]")))
        at, count = end + 1, count + len(values)
        if count > most:
            raise ValueError(f"Expected `array` of length <= {most} - at `$.{field}`")
        yield values


def _decoded(field: str, begin: int, decode: Callable[[bytes], list[V]], text: bytes) -> list[V]:
    try:
        return decode(text)
    except msgspec.ValidationError as error:
        at = _PLACE.search(str(error))
        where = f"$.{field}[{begin + int(at[1])}]" if at else f"$.{field}"
        raise ValueError(f"{_PLACE.sub('', str(error)).removesuffix(' - at ')} - at `{where}`") from None
