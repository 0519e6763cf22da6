"""A plugin with a handler that raises and one that blocks. Runs in the server process; installed for a test by
`faulty_server`."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kvframework.api.plugin import NoOptions
from kvframework.api.requests import Handler, Message, RequestSpec, RequestsProvider, hookimpl

LONG_S = 60.0


class Ask(Message, frozen=True):
    until: str = ""


class Answer(Message, frozen=True):
    text: str = ""


def _untyped(*_: object) -> Message:
    raise ZeroDivisionError("a secret")


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


HANDLERS = [
    Handler(RequestSpec(f"faulty.{name}", Ask, Answer, deadline_s=LONG_S), call)
    for name, call in (("UNTYPED", _untyped), ("WEDGES", _blocks))
]


@hookimpl
def kvf_request_handlers() -> list[RequestsProvider[NoOptions]]:
    return [RequestsProvider(name="faulty", summary="goes wrong", create=lambda _options, _services: HANDLERS)]
