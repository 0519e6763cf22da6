"""Makes the process that calls `become` one of another release. What differs is in $KVF_TEST_RELEASE, as JSON."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from kvframework.cli import serving
from kvframework.errors import KVFrameworkError, UnknownRequest
from kvframework.messaging.server import handlers as inflight
from kvframework.messaging.server import sockets
from kvframework.storage.l1 import journal
from kvframework.wire import frames, messages, protocol

VARIABLE = "KVF_TEST_RELEASE"


class Release(msgspec.Struct, forbid_unknown_fields=True):
    """`versions` of the protocol; `adds_fields`: every map that it sends has fields that nobody knows; `omits`: fields
    of HELLO's answer that it does not send; `lacks`: requests that it does not know; `error_code`: what its errors are
    called; `fingerprint` of its hasher; `other_objects`: it makes other objects of a layout; `journal`: its version;
    `takes_over_s`: how long each step of a takeover lasts."""

    versions: tuple[int, int] = (1, 1)
    adds_fields: bool = False
    omits: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    error_code: str = ""
    fingerprint: str = ""
    other_objects: bool = False
    journal: int = journal.SCHEMA
    takes_over_s: float = 0.0


def become() -> None:
    release = msgspec.json.decode(os.environ.get(VARIABLE, "{}"), type=Release)
    journal.SCHEMA = release.journal
    protocol.MIN_VERSION, protocol.PROTOCOL_VERSION = release.versions
    frames._encoder = _Encoder(release)  # type: ignore[assignment]
    for of, step in ((serving, "_stored"), (serving.HandedOver, "kept")) if release.takes_over_s else ():
        setattr(of, step, _slow(getattr(of, step), release.takes_over_s))
    if release.lacks:
        _forget(release.lacks)
    if release.error_code:
        sockets.error_payload = lambda error: frames.ErrorPayload(release.error_code, str(error))  # type: ignore[attr-defined]


def _slow(step: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return step(*arguments)

    return slow


class _Encoder:
    def __init__(self, release: Release) -> None:
        self._release = release

    def encode(self, payload: messages.Message) -> bytes:
        tree = msgspec.to_builtins(payload, builtin_types=(bytes,))
        if isinstance(payload, messages.HelloReply):
            tree = {name: each for name, each in tree.items() if name not in self._release.omits}
            if self._release.fingerprint:
                tree["hasher_fingerprint"] = self._release.fingerprint
        if isinstance(payload, messages.Registered) and self._release.other_objects:
            tree["desc"]["chunk_tokens"] = 0
        return msgspec.msgpack.encode(_with_more(tree) if self._release.adds_fields else tree)


def _with_more(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {**{name: _with_more(each) for name, each in tree.items()}, "of_tomorrow": {"a": [1, b"x", None, 1.5]}}
    return [_with_more(each) for each in tree] if isinstance(tree, list) else tree


def _forget(names: tuple[str, ...]) -> None:
    submit = inflight.InFlight.submit

    def submit_known(
        self: inflight.InFlight, session: Any, identity: bytes, envelope: frames.Envelope, received: float
    ) -> None:
        if envelope.type in names:
            raise _unknown(envelope.type)
        submit(self, session, identity, envelope, received)

    inflight.InFlight.submit = submit_known  # type: ignore[method-assign]


def _unknown(name: str) -> KVFrameworkError:
    return UnknownRequest(f"there is no request {name!r}", hint="configure the plugin that serves the request")
