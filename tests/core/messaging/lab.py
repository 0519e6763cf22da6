"""A message server with handlers that the tests steer, in a thread; and clients of it, well-behaved and raw."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import zmq

from kvframework.api.futures import Future, Promise
from kvframework.api.requests import Handler, Message, Reply, RequestSpec
from kvframework.errors import Cancelled
from kvframework.messaging.client.connection import Connection
from kvframework.messaging.server.loop import MessageServer, Served
from kvframework.messaging.server.sessions import ClientSession
from kvframework.wire.frames import ERROR_TYPE, ErrorPayload, decode, join, split
from kvframework.wire.messages import Hello, HelloReply, Pong
from kvframework.wire.protocol import LOCAL, REQUESTS

HASHER = "sha256:test"


class Text(Message, frozen=True):
    text: str = ""
    pid: int = 0


def _spec(name: str, **more: Any) -> RequestSpec:
    return RequestSpec(f"test.{name}", Text, Text, **more)


SPECS = [
    _spec("ECHO"),
    _spec("DEFERRED", deadline_s=600.0),
    _spec("SHORT", deadline_s=0.2),
    _spec("POOLED", deadline_s=600.0),
    _spec("POOLED_SHORT", deadline_s=0.2),
    _spec("ORDERED", deadline_s=600.0),
    _spec("FAILS", deadline_s=600.0),
    _spec("FAILS_POOLED", deadline_s=600.0),
    _spec("BUFFERS", buffers=4),
]
TABLE = {**REQUESTS, **{spec.name: spec for spec in SPECS}}


class Work:
    """What the handlers did and have open. Deferred futures stay open until a test resolves them."""

    def __init__(self, boot_id: bytes) -> None:
        self.boot_id = boot_id
        self.open: dict[str, Future[Message]] = {}
        self.cancelled: list[str] = []
        self.begun: list[str] = []
        self.ended: list[ClientSession] = []
        self.ticks = 0
        self.gate = threading.Event()  # pooled handlers wait for it
        self.fails: Callable[[], Any] = Text

    def handlers(self) -> dict[str, Handler[Any]]:
        calls = {
            "ECHO": lambda _, text, __: text,
            "DEFERRED": self._defer,
            "SHORT": self._defer,
            "FAILS": lambda *_: self.fails(),
            "BUFFERS": lambda _, text, buffers: Reply(text, [*buffers]),
        }
        handlers = [Handler(TABLE[f"test.{name}"], call) for name, call in calls.items()]
        handlers.append(Handler(TABLE["PING"], lambda *_: Pong(self.boot_id)))
        handlers.append(Handler(TABLE["test.POOLED"], self._pooled, pooled=True))
        handlers.append(Handler(TABLE["test.POOLED_SHORT"], self._pooled, pooled=True))
        handlers.append(Handler(TABLE["test.FAILS_POOLED"], lambda *_: self.fails(), pooled=True))
        handlers.append(Handler(TABLE["test.ORDERED"], self._ordered, pooled=True, ordered=True))
        return {handler.spec.name: handler for handler in handlers}

    def _defer(self, client: object, text: Text, buffers: object) -> Future[Message]:
        future: Promise[Message] = Promise(lambda: self.cancelled.append(text.text))
        self.open[text.text] = future
        return future

    def resolve(self, text: str) -> None:
        """As a transport does whose copy has ended."""
        future = self.open.pop(text)
        if text in self.cancelled:
            future.set_exception(Cancelled("stopped"))
        else:
            future.set_result(Text(text))

    def _pooled(self, client: object, text: Text, buffers: object) -> Message:
        self.begun.append(text.text)
        assert self.gate.wait(60)
        return Text(text.text + " " + threading.current_thread().name)

    def _ordered(self, client: object, text: Text, buffers: object) -> Message | Future[Message]:
        self.begun.append(text.text)
        if text.text.startswith("defer"):
            return self._defer(client, text, buffers)
        time.sleep(0.002)
        self.begun.append(text.text + " done")
        return text

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks == 1:
            raise ValueError("a tick that fails stops nothing")


def make_server(endpoint: str, work: Work, **options: Any) -> MessageServer:
    welcome = HelloReply(
        version=0,
        boot_id=work.boot_id,
        session=b"",
        chunk_size=256,
        hasher="sha256",
        hasher_fingerprint=HASHER,
        transports=(),
    )
    served = Served(
        handlers=options.pop("handlers", work.handlers()),
        welcome=options.pop("welcome", None) or (lambda *_: welcome),
        hasher_fingerprint=HASHER,
        arena_for=options.pop("arena_for", None),
        on_session_end=work.ended.append,
        on_tick=work.tick,
    )
    return MessageServer(endpoint, served, tick_s=0.02, **options)


class Lab:
    """A serving thread and what its handlers do."""

    def __init__(self, endpoint: str, **options: Any) -> None:
        self.endpoint = endpoint
        self.work = Work(os.urandom(8))
        self.server = make_server(endpoint, self.work, **options)
        self.server.bind()
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def stop(self, grace_s: float = 0.0) -> None:
        self.work.gate.set()
        self.server.stop(grace_s)
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextmanager
def connected(endpoint: str, *, up: bool = True, **options: Any) -> Iterator[Connection]:
    options.setdefault("on_up", lambda _, fd: None if fd is None else os.close(fd))
    options.setdefault("on_down", lambda: None)
    hello = options.pop("hello", Hello("test", os.getpid()))
    changes = {name: options.pop(name) for name in list(options) if name in LOCAL.__dataclass_fields__}
    # Of a busy machine: only a test whose server falls silent shortens them.
    options["deadlines"] = replace(LOCAL, **{"hello_s": 20.0, "silent_s": 20.0, **changes})
    connection = Connection(endpoint, hello, table=TABLE, **options)
    connection.start()
    try:
        assert not up or connection.wait_up(60), connection.last_error
        yield connection
    finally:
        connection.close()


def ask(connection: Connection, name: str, text: str = "", timeout: float = 20.0) -> Future[Any]:
    return connection.begin(f"test.{name}", Text(text), timeout=timeout)


class RawClient:
    def __init__(self, endpoint: str, *, hello: bool = True, rcvhwm: int = 1000) -> None:
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.setsockopt(zmq.RCVHWM, rcvhwm)
        self._dealer.connect(endpoint)
        self.welcome: HelloReply | None = None
        if hello:
            kind, reply = self.ask(1, "HELLO", Hello("raw", os.getpid()), HelloReply)
            assert kind == "HELLO"
            self.welcome = reply

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._dealer.close(0)
        self._context.term()

    def send(self, frames: Sequence[bytes]) -> None:
        self._dealer.send_multipart(frames)

    def post(self, request_id: int, name: str, payload: Message, buffers: Sequence[bytes] = ()) -> None:
        self.send([bytes(frame) for frame in join(request_id, name, payload, buffers)])

    def receive(self, timeout: float = 20.0) -> tuple[int, str, Any] | None:
        """(request id, type, payload frame or the decoded error), None if nothing comes."""
        if not self._dealer.poll(int(timeout * 1000)):
            return None
        envelope = split(self._dealer.recv_multipart())
        if envelope.type == ERROR_TYPE:
            return envelope.request_id, ERROR_TYPE, decode(envelope.payload, ErrorPayload, where="test")
        return envelope.request_id, envelope.type, envelope.payload

    def ask(self, request_id: int, name: str, payload: Message, response: type[Message] = Text) -> tuple[str, Any]:
        self.post(request_id, name, payload)
        answer = self.receive()
        assert answer is not None
        assert answer[0] == request_id
        return answer[1], answer[2] if answer[1] == ERROR_TYPE else decode(answer[2], response, where="test")
