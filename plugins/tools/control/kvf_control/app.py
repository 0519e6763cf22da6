"""The answers to HTTP requests, and the process that gives them: one event loop, and threads that wait for the server.

An order's text reaches the log by its id, its tenant and its numbers; never a token, a salt or a conversation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import unquote

import msgspec

from kvf_control import orders
from kvf_control.holder import Busy, Holder
from kvf_control.settings import ControlConfig
from kvf_control.texts import Texts
from kvf_observe.http.exposition import TEXT, Metric, Reader, Type, exposition
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
    refused,
    tls_context,
)
from kvframework.api.endpoint import parse_listen
from kvframework.errors import KVFrameworkError, RequestError

log = logging.getLogger(__name__)

WHERE = "kvframework control"
# 2^18 token ids in JSON.
MOST_BODY = 3 << 20
# Orders that wait for the server at once; further ones are refused.
MOST_WAITING, THREADS = 32, 8
MOST_SAID = 300
T = TypeVar("T", bound=msgspec.Struct)


def _metric(name: str, kind: Type, help_: str, read: Reader, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(f"control_{name}", kind, help_, "", read, labels)


def _whole(field: str) -> Reader:
    return lambda document: iter([((), document[field])])


METRICS = (
    _metric(
        "orders_total",
        "counter",
        "orders carried out",
        lambda document: (((do,), count) for do, count in document["orders"].items()),
        ("do",),
    ),
    _metric("refused_orders_total", "counter", "orders beyond a bound", _whole("refused")),
    _metric("pins", "gauge", "pins that are held", _whole("pins")),
    _metric("pinned_bytes", "gauge", "bytes of the KV that pins name", _whole("pinned_bytes")),
    _metric("loading", "gauge", "orders that load from tiers", _whole("loading")),
    _metric("conversations", "gauge", "conversations that are remembered", _whole("conversations")),
)


class App:
    """`answer` is called in the event loop, which never waits for the server: `threads` do."""

    def __init__(self, holder: Holder, texts: Texts, rights: Rights, threads: ThreadPoolExecutor) -> None:
        self._holder, self._texts, self._rights, self._threads = holder, texts, rights, threads
        self._waiting = self._refused = 0
        self._openapi = msgspec.json.encode(orders.openapi())

    def answer(self, request: Request) -> Answer:
        path = request.target.partition("?")[0]
        if not self._rights.is_here(request):
            return refused(HTTPStatus.MISDIRECTED_REQUEST)
        if path == "/livez":
            return Reply(HTTPStatus.OK, PLAIN, b"ok\n")
        if not self._rights.is_allowed(request):
            return refused(HTTPStatus.UNAUTHORIZED, CHALLENGE)
        routes = self._routes(path.strip("/").split("/"))
        if not routes:
            return refused(HTTPStatus.NOT_FOUND)
        if request.method not in routes:
            return refused(HTTPStatus.METHOD_NOT_ALLOWED, ("allow", ", ".join(routes)))
        return routes[request.method]()

    def _routes(self, parts: Sequence[str]) -> dict[str, Callable[[], Answer]]:
        """Return what answers at a path, by method."""
        holder = self._holder
        match parts:
            case ["metrics"]:
                return {"GET": self._metrics}
            case ["openapi.json"]:
                return {"GET": lambda: Reply(HTTPStatus.OK, JSON, self._openapi)}
            case ["v1", "prefetch"]:
                return {"POST": self._order(orders.Prefetch, holder.prefetch)}
            case ["v1", "pin"]:
                return {"POST": self._order(orders.Pin, holder.pin)}
            case ["v1", "forget"]:
                return {"POST": self._order(orders.Deletion, holder.forget)}
            case ["v1", "conversations", name, "turn"]:
                return {"POST": self._order(orders.Turn, partial(self._turn, unquote(name)))}
            case ["v1", "conversations", name, "end"]:
                return {"POST": self._order(orders.End, partial(self._end, unquote(name)))}
            case ["v1", "directives"]:
                return {"GET": lambda: self._asked(holder.directives)}
            case ["v1", "directives", name]:
                return {"DELETE": lambda: self._asked(partial(holder.cancel, name))}
        return {}

    async def _metrics(self) -> Reply:
        found = await asyncio.get_running_loop().run_in_executor(self._threads, self._holder.document)
        rows = ((metric, found | {"refused": self._refused}) for metric in METRICS)
        return Reply(HTTPStatus.OK, TEXT, exposition(rows, open_metrics=False))

    def _turn(self, conversation: str, turn: orders.Turn) -> orders.Directive:
        named = {name: value for name, value in msgspec.structs.asdict(turn).items() if name != "seconds"}
        return self._holder.turn(
            msgspec.convert({**named, "conversation": conversation}, orders.Prefetch), turn.seconds
        )

    def _end(self, conversation: str, end: orders.End) -> orders.Directive:
        return self._holder.end_conversation(conversation, end.tenant)

    def _order(self, kind: type[T], carry_out: Callable[[T], object]) -> Callable[[], Answer]:
        def ordered(given: bytes) -> object:
            return carry_out(self._texts.tokenized(msgspec.json.decode(given or b"{}", type=kind)))

        return lambda: WantsBody(MOST_BODY, lambda body: self._asked(partial(ordered, bytes(body))))

    async def _asked(self, call: Callable[[], object]) -> Reply:
        if self._waiting >= MOST_WAITING:
            return _failed(HTTPStatus.TOO_MANY_REQUESTS, f"{MOST_WAITING} orders wait for the server")
        self._waiting += 1
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return _failed(HTTPStatus.BAD_REQUEST, str(error))
        except Busy as error:
            self._refused += 1
            return _failed(HTTPStatus.TOO_MANY_REQUESTS, str(error))
        except RequestError as error:
            return _failed(HTTPStatus.BAD_REQUEST, str(error))
        except KVFrameworkError as error:
            return _failed(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        finally:
            self._waiting -= 1
        return Reply(HTTPStatus.OK, JSON, msgspec.json.encode(answer))


def _failed(status: HTTPStatus, why: str) -> Reply:
    more = (("retry-after", "1"),) if status != HTTPStatus.BAD_REQUEST else ()
    return Reply(status, JSON, msgspec.json.encode(orders.Problem(why[:MOST_SAID])), more)


def control(endpoint: str, config: ControlConfig) -> None:
    """Take orders until SIGINT or SIGTERM, whether or not the server is there. In the main thread, after `check`.
    Raises `ConfigError`, also of what has changed since."""
    holder = Holder(endpoint, config.state)
    try:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="kvf-control") as threads:
            host, _ = parse_listen(config.listen)
            app = App(
                holder,
                Texts(config.tokenizers),
                Rights(partial(read_token, config), loopback=is_loopback(host)),
                threads,
            )
            listener = Listener(app.answer, tls=tls_context(config))
            asyncio.run(listen_until_signal(listener, config, WHERE, "orders"))
    finally:
        holder.close()
