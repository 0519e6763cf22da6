"""Loads that wait for their engine's thread, between two pieces: they keep nothing that others wait for."""

from __future__ import annotations

import os

import pytest

from kvframework.api.futures import Future
from kvframework.api.transport import LoadOutcome
from kvframework.client import KVClient
from kvframework.errors import ServerGone
from tests.support.engines import PagedEngine
from tests.support.server_process import ServerProcess, server_fixture
from tests.support.waiting import wait_until

pytestmark = pytest.mark.torch

TOKENS = list(range(1024))
BLOCKS = [list(range(64))]


server = server_fixture()


def connected(server: ServerProcess) -> KVClient:
    client = KVClient(server.endpoint, deadline_scale=20.0)
    assert client.wait_up(60)
    return client


def between_pieces(engine: PagedEngine) -> Future[LoadOutcome]:
    request = engine.request(TOKENS)
    assert engine.worker.submit_store(request, 0, 1024, BLOCKS).result(60).ok
    load = engine.worker.submit_retrieve(request, 0, 1024, BLOCKS, in_pieces=True)
    wait_until(lambda: load.advance(1), what="the first piece")
    assert not load.query()
    return load


def test_the_end_of_the_connection_ends_them(server: ServerProcess) -> None:
    """A client that was closed, and opened again, found its own instance registered: its arena was still in use."""
    client = connected(server)
    engine = PagedEngine(client)
    load = between_pieces(engine)
    client.close()
    outcome = load.result(0)
    assert (outcome.ok, outcome.error) == (False, "run.cancelled")
    wait_until(lambda: not server.status()["instances"], what="the end of the session")
    with connected(server) as again:
        PagedEngine(again).worker.close()
    engine.worker.close()


def test_a_connection_that_breaks_is_replaced(server: ServerProcess) -> None:
    """The next one registers the instance again, for which the session of the first has to end: the client stayed away
    from its server as long as the engine did not go on with the load."""
    with connected(server) as client:
        engine = PagedEngine(client)
        load = between_pieces(engine)
        broken = client._connection._link
        broken._stop(ServerGone("a signal interrupted sending a message"))
        wait_until(lambda: client._connection._link is not broken and client.usable, what="another connection")
        assert not load.result(60).ok
        engine.worker.close()


def test_a_server_that_is_killed_ends_them(server: ServerProcess) -> None:
    with connected(server) as client:
        engine = PagedEngine(client)
        load = between_pieces(engine)
        server.kill9()
        assert not load.result(60).ok
        server.start()
        assert client.wait_up(60)
        renewed = between_pieces(engine)
        renewed.advance()
        assert renewed.result(60).ok
        engine.worker.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_go_on_with_them(server: ServerProcess) -> None:
    """It has no arena to copy from."""
    with connected(server) as client:
        engine = PagedEngine(client)
        load = between_pieces(engine)
        child = os.fork()
        if not child:
            try:
                os._exit(load.advance())
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        load.advance()
        assert load.result(60).ok
        engine.worker.close()
