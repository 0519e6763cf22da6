"""A real server on real sockets, serving from a thread of the test's process, so that a test can bring plugins."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from kvframework.api.requests import Handler
from kvframework.config.load import load_config
from kvframework.errors import UnknownRequest
from kvframework.registry.registry import PluginRegistry
from kvframework.server import Server
from tests.support.waiting import wait_until


@contextmanager
def serving(
    *settings: str,
    plugins: tuple[object, ...] = (),
    registry: PluginRegistry | None = None,
    capacity: str = "16MiB",
    config: Path | None = None,
) -> Iterator[Server]:
    registry = registry or PluginRegistry()
    for plugin in plugins:
        registry.register(plugin, distribution="tests")
    with tempfile.TemporaryDirectory(prefix="kvf-") as directory:
        overrides = (f"server.endpoint=ipc://{directory}/s.sock", f"l1.capacity={capacity}", *settings)
        server = Server(load_config(config, overrides), registry)
        server.bind()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        storage = server.service.storage
        try:
            wait_until(lambda: storage.status()["l1"]["ready_bytes"] == storage.table.capacity, what="the arena")
            yield server
        finally:
            server.stop()
            thread.join(10)
            assert not thread.is_alive()


@contextmanager
def serving_without(request: str, *settings: str) -> Iterator[Server]:
    """A server that does not know a request, as one of an earlier release."""

    def refuse(*_: object) -> None:
        raise UnknownRequest(f"there is no request {request!r}")

    with serving(*settings) as server:
        handlers = server._messages.served.handlers
        assert isinstance(handlers, dict)
        old = Handler(handlers[request].spec, refuse)  # type: ignore[arg-type]
        with mock.patch.dict(server._messages._calls._handlers, {request: old}):
            yield server
