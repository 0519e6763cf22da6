"""What these tests share: an eye on the module's `server`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvframework.wire import messages as m
from tests.support.server_process import ServerProcess
from tests.support.wire_client import WireClient


@pytest.fixture
def watcher(server: ServerProcess) -> Iterator[WireClient]:
    """A client of the server, which holds nothing yet."""
    with server.client(timeout=20.0) as client:
        client.call("CLEAR", m.Clear())
        yield client
