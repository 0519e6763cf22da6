from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvframework.wire.messages import Clear
from tests.support.server_process import ServerProcess
from tests.support.wire_client import WireClient


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One server process for the tests of a module; each test cleans up by closing its clients."""
    with ServerProcess() as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[WireClient]:
    with server.client() as connected:
        yield connected
        connected.call("CLEAR", Clear())
