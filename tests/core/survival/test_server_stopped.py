"""The server is stopped (SIGSTOP) under a live engine: its threads wait once, then all is a miss at once until it is
back.

Here all of an engine's waits are equal and long, so that a wait is told from a moment in which this machine was busy.
What each waits otherwise, and goes on waiting in the background: tests/core/client/test_deadlines.py.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from kvframework.client import KVClient  # noqa: E402
from kvframework.client.scheduler import LookupResult  # noqa: E402
from tests.core.client.test_hazards import Gate  # noqa: E402
from tests.core.survival.holdings import held  # noqa: E402
from tests.support.engines import PagedEngine  # noqa: E402
from tests.support.server_process import ServerProcess, server_fixture  # noqa: E402
from tests.support.waiting import wait_until  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

WAIT_S = 0.8
# A call that took longer has waited.
WAITED_S = WAIT_S / 2
HERE, THERE = [list(range(32))], [list(range(32, 64))]
TOKENS = list(range(512))
REVISIONS = itertools.count()
CALLS = ["lookup", "store", "load", "free", "end_request", "poll", "finished"]


server = server_fixture(scope="module")


@pytest.fixture
def client(server: ServerProcess) -> Iterator[KVClient]:
    with KVClient(server.endpoint) as connected:
        assert connected.wait_up(20)
        waits = dict.fromkeys(("engine_s", "lookup_s", "load_s", "store_s", "release_s"), WAIT_S)
        connected.deadlines = replace(connected.deadlines, **waits)
        yield connected


@pytest.fixture
def engine(client: KVClient) -> Iterator[PagedEngine]:
    made = PagedEngine(client, revision=str(next(REVISIONS)))  # what another one stored is not its own
    assert made.worker.submit_store(made.request(TOKENS), 0, 512, HERE).result(30).ok
    yield made
    made.worker.close()


def calls_of(engine: PagedEngine, tickets: list[LookupResult]) -> dict[str, Callable[[], bool]]:
    """What an engine calls while it runs, and whether the answer is the one of an engine without a cache."""

    def pending() -> bool:
        return engine.scheduler.poll(LookupResult(0, "of old", pending=True)).hit_tokens == 0

    def finished() -> bool:
        stored, retrieved = engine.worker.get_finished()
        return len(stored | retrieved) <= 1

    def frees() -> bool:
        engine.scheduler.free(tickets.pop())
        return True

    def ends() -> bool:
        engine.scheduler.end_request("r")
        return True

    return {
        "lookup": lambda: engine.scheduler.lookup(engine.request(TOKENS)).hit_tokens == 0,
        "store": lambda: not engine.worker.submit_store(engine.request([5] * 512), 0, 512, HERE).result(30),
        "load": lambda: not engine.worker.submit_retrieve(engine.request(TOKENS), 0, 512, THERE).result(30),
        "free": frees,
        "end_request": ends,
        "poll": pending,
        "finished": finished,
    }


@pytest.mark.parametrize("first", CALLS)
def test_one_call_waits_and_all_others_miss_at_once(
    server: ServerProcess, client: KVClient, engine: PagedEngine, first: str
) -> None:
    rounds = 10
    tickets = [engine.scheduler.lookup(engine.request(TOKENS)) for _ in range(rounds)]
    assert all(ticket.hit_tokens == 512 for ticket in tickets)
    calls = calls_of(engine, tickets)
    order = [first, *(name for name in CALLS if name != first)]
    waited = []
    server.sigstop()
    try:
        for _ in range(rounds):
            for name in order:
                began = time.monotonic()
                assert calls[name](), name
                if time.monotonic() - began > WAITED_S:
                    waited.append(name)
    finally:
        server.sigcont()
    assert len(waited) <= 1, "one call finds out, and nobody waits after it"
    assert engine.worker.take_failed_blocks() == [set(THERE[0])], "loads that failed are named"
    works_again(server, client, engine)


def test_a_store_under_way_waits_once_and_a_load_is_whole(
    server: ServerProcess, client: KVClient, engine: PagedEngine
) -> None:
    """Both have their ranges when the server stops: what is left for them is to say so. A store is one only once the
    server knows; the pins of a load held, as the client knows by itself."""
    for good, submit in (
        (False, lambda event: engine.worker.submit_store(engine.request([6] * 512), 0, 512, HERE, event=event)),
        (True, lambda event: engine.worker.submit_retrieve(engine.request(TOKENS), 0, 512, THERE, event=event)),
    ):
        for tensor in engine.kv.values():
            tensor[:, THERE[0]] = 0
        gate, took, answers = Gate(), [], []

        def work(submit=submit, gate=gate, took=took, answers=answers) -> None:  # type: ignore[no-untyped-def]
            answers.append(submit(gate).result(30).ok)
            took.append(time.monotonic())

        thread = threading.Thread(target=work)
        thread.start()
        assert gate.reached.wait(60)
        server.sigstop()
        try:
            opened = time.monotonic()
            gate.open.set()
            thread.join(10)
        finally:
            server.sigcont()
        assert answers == [good]
        assert took[0] - opened < 1.75 * WAIT_S, "it waits for one answer, not for two"
        wait_until(lambda: client.usable, what="the client to heal")
    for tensor in engine.kv.values():
        assert torch.equal(tensor[:, THERE[0]], tensor[:, HERE[0]])
    works_again(server, client, engine)


def works_again(server: ServerProcess, client: KVClient, engine: PagedEngine) -> None:
    """Hits again, bit for bit, in the same session; and nothing is left of what was asked in between."""
    wait_until(lambda: client.usable, what="the client to heal")
    engine.worker.get_finished()
    request = engine.request(TOKENS)
    found = engine.scheduler.lookup(request)
    assert found.hit_tokens == 512
    for tensor in engine.kv.values():
        tensor[:, THERE[0]] = 0
    assert engine.worker.submit_retrieve(request, 0, 512, THERE).result(30).ok
    for tensor in engine.kv.values():
        assert torch.equal(tensor[:, THERE[0]], tensor[:, HERE[0]])
    assert engine.worker.submit_store(engine.request([8] * 512), 0, 512, HERE).result(30).ok
    engine.scheduler.free(found)
    with server.client() as watcher:
        wait_until(lambda: held(watcher) == {}, what="what was given up")
