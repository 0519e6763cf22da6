"""A plugin whose requests go wrong in every way that a handler can. Runs in the server process; installed for a test by
`faulty_server`.

The requests' own deadline on the server is `SHORT_S` where they take time, else long enough that whoever is answered by
it was not answered in time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvframework.api.futures import Future, Promise
from kvframework.api.plugin import NoOptions
from kvframework.api.requests import Handler, Message, Reply, RequestSpec, RequestsProvider, hookimpl
from kvframework.errors import BadRange
from kvframework.wire.frames import MAX_PAYLOAD_BYTES
from kvframework.wire.messages import Pong

SHORT_S, LONG_S = 0.3, 60.0


class Ask(Message, frozen=True):
    until: str = ""


class Answer(Message, frozen=True):
    text: str = ""


def _untyped(*_: object) -> Message:
    raise ZeroDivisionError("a secret")


def _typed(*_: object) -> Message:
    raise BadRange("the range is bad", where="here", hint="a better one")


def _exits(*_: object) -> Message:
    raise SystemExit(3)


def _recurses(*_: object) -> Message:
    return _recurses()


def _fails_later(*_: object) -> Future[Message]:
    return Future.failed(ZeroDivisionError("a secret"))


def begun(until: Path) -> Path:
    """The file by which `_blocks` says that it has begun."""
    return until.with_suffix(".begun")


def _blocks(_client: object, ask: Ask, _buffers: object) -> Message:
    """Until the file `ask.until` is there."""
    begun(Path(ask.until)).touch()
    end = time.monotonic() + LONG_S
    while not os.path.exists(ask.until) and time.monotonic() < end:
        time.sleep(0.005)
    return Answer("done")


def _handler(name: str, call: Callable[..., Any], deadline_s: float = LONG_S, *, pooled: bool = False) -> Handler[Ask]:
    return Handler(RequestSpec(f"faulty.{name}", Ask, Answer, deadline_s=deadline_s), call, pooled=pooled)


HANDLERS = [
    _handler("FINE", lambda *_: Answer("fine")),
    _handler("UNTYPED", _untyped),
    _handler("UNTYPED_POOLED", _untyped, pooled=True),
    _handler("TYPED", _typed),
    _handler("EXITS", _exits),
    _handler("EXITS_POOLED", _exits, pooled=True),
    _handler("RECURSES", _recurses),
    _handler("FAILS_LATER", _fails_later),
    _handler("NOTHING", lambda *_: None),
    _handler("ANOTHER_ANSWER", lambda *_: Pong(b"not an Answer")),
    _handler("NO_TEXT", lambda *_: Answer("\ud800")),
    _handler("TOO_LARGE", lambda *_: Answer("x" * MAX_PAYLOAD_BYTES)),
    _handler("BAD_BUFFER", lambda *_: Reply(Answer(), [memoryview(bytearray(200_000))[::2]])),
    _handler("NEVER", lambda *_: Promise(), SHORT_S),
    _handler("SLOW", _blocks, SHORT_S, pooled=True),
    _handler("WEDGES", _blocks),
]


@hookimpl
def kvf_request_handlers() -> list[RequestsProvider[NoOptions]]:
    return [RequestsProvider(name="faulty", summary="goes wrong", create=lambda _options, _services: HANDLERS)]
