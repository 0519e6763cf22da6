"""A step's stores and loads as one batch, against a real server: in order, and no future is lost. Loads that wait for
their engine's thread, between two pieces: they keep nothing that others wait for."""

from __future__ import annotations

import os
from typing import Any

import pytest

from kvframework import errors
from kvframework.api.futures import Future
from kvframework.api.transport import LoadOutcome, StoreOutcome
from kvframework.client import KVClient, RequestHashes
from kvframework.errors import ServerGone
from kvframework.wire import messages as m
from tests.support.engines import CHUNK, PagedEngine
from tests.support.lazy import torch
from tests.support.server_process import ServerProcess, server_fixture
from tests.support.waiting import wait_until

pytestmark = pytest.mark.torch

BLOCKS_A, BLOCKS_B = list(range(16)), list(range(16, 32))
TWO = [(0, CHUNK)] * 2


def two_requests(engine: PagedEngine, first: int = 0) -> list[RequestHashes]:
    return [engine.request([first + n] * CHUNK, f"r{n}") for n in range(2)]


def asked(server: ServerProcess, since: int) -> list[tuple[str, str]]:
    """The stores and loads that the server has been asked for, in order."""
    with server.client() as watcher:
        records = watcher.call("RECENT", m.Recent(since)).records
    return [(each.request, each.request_id) for each in records if each.request in ("STORE", "RETRIEVE")]


def asked_so_far(server: ServerProcess) -> int:
    with server.client() as watcher:
        return int(watcher.call("RECENT", m.Recent()).last)


def test_a_batch_is_its_single_transfers_in_order(server: ServerProcess, engine: PagedEngine) -> None:
    since, requests = asked_so_far(server), two_requests(engine)
    stored = engine.worker.batched_submit_store(requests, TWO, [[BLOCKS_A], [BLOCKS_B]])
    assert [future.result(30) for future in stored] == [StoreOutcome(stored=1)] * 2
    targets = [list(range(32, 48)), list(range(48, 64))]
    before = engine.kv["layer0"].clone()
    loaded = engine.worker.batched_submit_retrieve(requests, TWO, [[each] for each in targets], None, [0, 48])
    assert all(future.result(30).ok for future in loaded)
    assert engine.worker.get_finished() == ({"r0", "r1"}, {"r0", "r1"})
    assert asked(server, since) == [("STORE", "r0"), ("STORE", "r1"), ("RETRIEVE", "r0"), ("RETRIEVE", "r1")]
    kv = engine.kv["layer0"]
    assert torch.equal(kv[:, targets[0]], before[:, BLOCKS_A])
    assert torch.equal(kv[:, targets[1][3:]], before[:, BLOCKS_B[3:]])
    assert torch.equal(kv[:, targets[1][:3]], before[:, targets[1][:3]]), "skipped"


@pytest.mark.parametrize("short", ["requests", "ranges", "block_ids", "skip_first_n_tokens"])
def test_lists_of_unequal_length_are_refused(server: ServerProcess, engine: PagedEngine, short: str) -> None:
    since = asked_so_far(server)
    lists: dict[str, Any] = {"requests": two_requests(engine), "ranges": TWO, "block_ids": [[BLOCKS_A], [BLOCKS_B]]}
    if short == "skip_first_n_tokens":
        lists[short] = [0, 0]
    lists[short] = lists[short][:1]
    with pytest.raises(errors.RequestError, match="lists of"):
        engine.worker.batched_submit_retrieve(**lists)
    if short != "skip_first_n_tokens":
        with pytest.raises(errors.RequestError, match="lists of"):
            engine.worker.batched_submit_store(**lists)
    assert engine.worker.get_finished() == (set(), set())
    assert asked(server, since) == []


BAD: list[tuple[tuple[int, int], list[Any], type[errors.KVFrameworkError]]] = [
    ((0, CHUNK), [BLOCKS_B[:15]], errors.BadBlockIds),
    ((100, CHUNK), [BLOCKS_B], errors.BadRange),
]


@pytest.mark.parametrize(("tokens", "blocks", "expected"), BAD)
def test_a_bad_item_is_refused_or_fails_behind_the_first(
    engine: PagedEngine, tokens: tuple[int, int], blocks: list[Any], expected: type[errors.KVFrameworkError]
) -> None:
    for submit in (engine.worker.batched_submit_store, engine.worker.batched_submit_retrieve):
        with pytest.raises(expected):
            submit(two_requests(engine), [tokens, (0, CHUNK)], [blocks, [BLOCKS_A]])
        assert engine.worker.get_finished() == (set(), set())
        good, bad = submit(two_requests(engine), [(0, CHUNK), tokens], [[BLOCKS_A], blocks])
        assert good.result(30).ok
        assert (bad.result(0).ok, bad.result(0).error) == (False, expected.code)
        assert set().union(*engine.worker.get_finished()) == {"r0", "r1"}
    assert engine.worker.take_failed_blocks() == [{*blocks[0]}]


class ChangedTensors:
    """An event at which the transport sees the engine's tensors changed, the second time that it waits."""

    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1
        if self.waits == 2:
            raise errors.BadLayout("tensors of another shape")


def test_what_is_refused_behind_the_first_has_its_future_too(engine: PagedEngine) -> None:
    """A transport looks at the tensors itself. An exception then would lose the futures of what is under way."""
    requests = two_requests(engine)
    stored = engine.worker.batched_submit_store(requests, TWO, [[BLOCKS_A], [BLOCKS_B]], ChangedTensors())  # type: ignore[arg-type]
    assert [future.result(30) for future in stored] == [
        StoreOutcome(stored=1),
        StoreOutcome(dropped=1, error=errors.BadLayout.code),
    ]
    assert engine.worker.submit_store(requests[1], 0, CHUNK, [BLOCKS_B]).result(30).ok
    loaded = engine.worker.batched_submit_retrieve(requests, TWO, [[BLOCKS_A], [BLOCKS_B]], ChangedTensors())  # type: ignore[arg-type]
    assert [future.result(30).ok for future in loaded] == [True, False]
    assert engine.worker.get_finished() == ({"r0", "r1"}, {"r0", "r1"})
    assert engine.worker.take_failed_blocks() == [set(BLOCKS_B)]


def test_without_a_registration_each_item_is_a_miss(server: ServerProcess) -> None:
    with server.engine_client() as client:
        engine = PagedEngine(client)
        requests = two_requests(engine)
        engine.worker.close()
        stored = engine.worker.batched_submit_store(requests, TWO, [[BLOCKS_A], [BLOCKS_B]])
        loaded = engine.worker.batched_submit_retrieve(requests, TWO, [[BLOCKS_A], [BLOCKS_B]])
        assert [future.result(0).error for future in [*stored, *loaded]] == [errors.NotRegistered.code] * 4
        assert engine.worker.get_finished() == ({"r0", "r1"}, {"r0", "r1"})
        assert engine.worker.take_failed_blocks() == [{*BLOCKS_A, *BLOCKS_B}]


def test_failed_loads_of_several_layouts_lose_no_request(engine: PagedEngine) -> None:
    """As of an engine that registers other tensors before it has asked which loads of the earlier ones failed."""
    engine.worker.close()
    engine.worker.batched_submit_retrieve(two_requests(engine), TWO, [[BLOCKS_A], [BLOCKS_A, BLOCKS_B]])
    assert engine.worker.get_finished() == (set(), {"r0", "r1"})
    assert engine.worker.take_failed_blocks() == [{*BLOCKS_A}, {*BLOCKS_B}]


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
