"""The conformance kit for listeners: tests that every `Listener` must pass, see docs/plugins/listeners.md."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, cast

import msgspec
import pytest

from kvf_dev.testing.kit import NamedKit
from kvframework.api.hasher import HasherProvider
from kvframework.api.keys import CacheKey, PackedKey
from kvframework.api.listener import ChunkShape, Listener, ListenerContext, ListenerProvider, RequestRecord, ServerTerms
from kvframework.messaging.server.sockets import ListenerDoors
from kvframework.record_ring import RecordRing, RingReader
from kvframework.registry.registry import PluginRegistry
from kvframework.service.listeners import STOP_S, ServerContext

MakeListener = Callable[[ListenerContext], Listener]

_NAMESPACE, _DIGEST = b"n" * 16, b"d" * 32
_KEY = PackedKey(_NAMESPACE.ljust(40, b"\0") + _DIGEST)


def _fill(ring: RecordRing) -> None:
    key = CacheKey("model", 1, 0, _NAMESPACE, 0, 256, "request", digests=_DIGEST)
    who = ("request", "engine", 7, 3, "model", _NAMESPACE[:4].hex())
    ring.added([_KEY, _KEY[::-1]])
    ring.registered(key, None)
    ring.registered(msgspec.structs.replace(key, namespace=b"?" * 16), None)
    ring.accessed(1, [_KEY], found=True)
    ring.accessed(2, [_KEY, _KEY[::-1]], [True, False])
    ring.finished(RequestRecord(0, "LOOKUP", 2.0, 2.0, 1.0, *who, "hit", 0, 256))
    ring.removed(_KEY)


class _Heard:
    """A listener in its thread, and the ring that it reads."""

    def __init__(self, listener: Listener) -> None:
        self.ring = RecordRing(wanted=True)
        self.listener = listener
        self.error: BaseException | None = None
        self.reader: RingReader = self.ring.open()
        self.thread = threading.Thread(target=self._run, daemon=True)
        listener.start(keeps=False)

    def end(self) -> None:
        self.reader.end(handed_over=False)
        if not self.thread.ident:
            self.thread.start()
        self.thread.join(STOP_S)

    def _run(self) -> None:
        try:
            self.listener.listen(self.reader)
        except BaseException as error:
            self.error = error
            raise


class ListenerConformance(NamedKit):
    """Base class of an author's test class, which gives `use`, or a fixture `make_listener`: a function of a
    `ListenerContext` that returns a new listener."""

    _descriptor = ListenerProvider
    usual_s = 1.0

    endpoint: ClassVar[str] = "ipc:///run/kvframework/server.sock"
    """The server's, as the listener learns it; nothing listens there."""

    @pytest.fixture
    def make_listener(self) -> MakeListener:
        make: MakeListener = cast("MakeListener", self.by_name())
        return make

    @pytest.fixture
    def heard(self, make_listener: MakeListener) -> Iterator[_Heard]:
        hasher = PluginRegistry().resolve("hasher", "sha256")
        assert isinstance(hasher, HasherProvider)
        context = ServerContext(
            "[[listener]] #1",
            ServerTerms(256, (self.endpoint,)),
            hasher.create(hasher.options()),
            lambda keys: [key == _KEY for key in keys],
            lambda namespace, _salt: ChunkShape("model", 256, [_KEY[:40]]) if namespace == _NAMESPACE else None,
            ListenerDoors(),
        )
        heard = _Heard(make_listener(context))
        yield heard
        heard.end()

    def test_it_hears_every_kind_of_record_and_ends_with_the_server(self, heard: _Heard) -> None:
        heard.thread.start()
        _fill(heard.ring)
        heard.end()
        assert not heard.thread.is_alive(), f"`listen` has not returned {STOP_S:g} s after the end of the records"
        assert heard.error is None, f"`listen` raised {heard.error!r}"
        assert not heard.reader.waiting, "`listen` returned before the end of the records: read until the reader ends"

    def test_it_bears_a_gap(self, heard: _Heard, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvframework.record_ring.MOST_BYTES", 1000)
        for _ in range(3):
            _fill(heard.ring)
        heard.thread.start()
        heard.end()
        assert not heard.thread.is_alive()
        assert heard.error is None, f"`listen` raised {heard.error!r} after records were lost"

    def test_its_status_is_json_and_it_says_what_contents_it_wants(self, heard: _Heard) -> None:
        heard.thread.start()
        for ended in (False, True):
            if ended:
                heard.end()
            status = heard.listener.status()
            assert isinstance(status, Mapping)
            msgspec.json.encode(dict(status))
        assert heard.listener.wants in ("none", "plain", "salted")
