from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvframework.wire.messages import Clear
from tests.support.server_process import ServerProcess, server_fixture
from tests.support.wire_client import WireClient

# One server process for the tests of a module; each test cleans up by closing its clients.
server = server_fixture(scope="module")


@pytest.fixture
def client(server: ServerProcess) -> Iterator[WireClient]:
    with server.client() as connected:
        yield connected
        connected.call("CLEAR", Clear())
