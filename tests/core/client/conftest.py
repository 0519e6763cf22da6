"""A server for each module, emptied for each test, a client of it, and an engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvframework.client import KVClient
from tests.support.engines import PagedEngine
from tests.support.server_process import ServerProcess, client_fixture, server_fixture

process = server_fixture(scope="module")


@pytest.fixture
def server(process: ServerProcess) -> ServerProcess:
    return process.emptied()


client = client_fixture(engine=True)


@pytest.fixture
def engine(client: KVClient) -> Iterator[PagedEngine]:
    made = PagedEngine(client)
    yield made
    made.worker.close()
