"""An engine of several processes in one session: the scheduler reserves, its workers write. Whichever of them dies, or
the server, nothing is published that is not whole, and no place is another's while somebody may write there."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from kvframework.client import KVClient
from kvframework.client.opaque import OpaqueInstance, granted_objects, map_arena
from kvframework.errors import ServerGone
from tests.core.survival import offload_program
from tests.core.survival.offload_program import OBJECT, TOKENS, about, keys, objects
from tests.support.held_server import HeldServer
from tests.support.line_process import JsonProcess
from tests.support.server_process import ServerProcess, server_fixture
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

IN_ALL, CHUNKS, PATIENCE_S = 32, 4, 60.0
MINE, LATE = 0x11, 0xEE


class Program(JsonProcess):
    def __init__(self, role: str, place: str) -> None:
        super().__init__("-m", offload_program.__name__, role, place)

    def kill9(self) -> None:
        self.process.kill()
        self.process.wait(60)


class Others:
    def __init__(self, client: KVClient) -> None:
        self._client = client
        self._instance = OpaqueInstance(client, objects(99))
        self.ready()
        self._prompts = 0

    def ready(self) -> None:
        wait_until(lambda: self._instance.is_ready, PATIENCE_S, "the registration")

    def fill(self) -> dict[int, int]:
        """Store twice what L1 holds, one object a prompt. Returns the places of those that are there, by prompt."""
        first, self._prompts = self._prompts, self._prompts + 2 * IN_ALL
        for prompt in range(first, self._prompts):
            self.store(prompt, 1)
        return self.found(range(first, self._prompts))

    def store(self, prompt: int, chunks: int) -> int:
        plan = self._instance.prepare_store(about(prompt, chunks), keys(prompt, chunks)).result(60)
        for place in plan.ranges:
            plan.arena[place.offset : place.offset + OBJECT] = _content(prompt)
        return plan.commit().result(60).stored

    def found(self, prompts: Any) -> dict[int, int]:
        """The places of the prompts that are there, whose every byte is compared."""
        there = {}
        arena = self._client.arena
        assert arena is not None
        for prompt in prompts:
            for offset in self.places(prompt, 1):
                assert bytes(arena.view[offset : offset + OBJECT]) == _content(prompt), f"foreign bytes in {prompt}"
                there[prompt] = offset
        return there

    def places(self, prompt: int, chunks: int) -> list[int]:
        reply = self._instance.lookup(about(prompt, chunks), keys(prompt, chunks)).result(60)
        found = [offset for _, _, offset in granted_objects(reply, keys(prompt, chunks))]
        self._instance.release(reply.ticket, *[grant.lease for grant in reply.grants])
        assert len(found) * TOKENS == reply.hit_tokens
        return found


def _content(prompt: int) -> bytes:
    return b"%08d" % prompt * (OBJECT // 8)


process = server_fixture("server.store_lease_s=0.5", capacity="1MiB", scope="module")


@pytest.fixture
def server(process: ServerProcess) -> ServerProcess:
    return process.emptied()


@contextlib.contextmanager
def engine(server: ServerProcess) -> Iterator[tuple[Program, Program, list[int]]]:
    """A scheduler that has reserved the places of prompt -1, and a worker that has written there."""
    with Program("scheduler", server.endpoint) as scheduler:
        ticket = msgspec.json.encode(scheduler.ask("ticket")).decode()
        with Program("worker", ticket) as worker:
            offsets = scheduler.ask("reserve", -1, CHUNKS)
            assert len(offsets) == CHUNKS
            worker.ask("write", offsets, MINE)
            yield scheduler, worker, offsets


def quarantined(server: ServerProcess) -> int:
    return int(server.status()["l1"]["quarantined_bytes"])


def nobody_else_gets(others: Others, worker: Program, offsets: list[int]) -> None:
    """While a worker writes on and on, what others store is elsewhere and stays whole."""
    there = others.fill()
    worker.ask("write", offsets, LATE)
    assert others.found(there) == there
    assert not set(there.values()) & set(offsets)
    assert len(there) == IN_ALL - CHUNKS
    assert others.places(-1, CHUNKS) == []


def all_of_l1_comes_back(server: ServerProcess, others: Others) -> None:
    wait_until(lambda: quarantined(server) == 0, PATIENCE_S, "the end of the quarantine")
    wait_until(lambda: server.status()["l1"]["write_leases"] == 0, PATIENCE_S, "the end of the leases")
    assert len(others.fill()) == IN_ALL


@pytest.fixture
def others(server: ServerProcess) -> Iterator[Others]:
    with server.engine_client() as client:
        yield Others(client)


def test_a_scheduler_says_goodbye_while_its_worker_writes(server: ServerProcess, others: Others) -> None:
    with engine(server) as (scheduler, worker, offsets):
        scheduler.ask("goodbye")
        wait_until(lambda: quarantined(server) == CHUNKS * OBJECT, PATIENCE_S, "the quarantine")
        nobody_else_gets(others, worker, offsets)
        scheduler.kill9()
        nobody_else_gets(others, worker, offsets)
        worker.kill9()
        all_of_l1_comes_back(server, others)


@pytest.mark.parametrize("first", ["scheduler", "worker", "both"])
def test_an_engine_dies_between_reserve_and_commit(server: ServerProcess, others: Others, first: str) -> None:
    with engine(server) as (scheduler, worker, offsets):
        if first != "worker":
            scheduler.kill9()
        if first == "scheduler":
            nobody_else_gets(others, worker, offsets)
        worker.kill9()
        scheduler.kill9()
        wait_until(lambda: server.status()["l1"]["write_leases"] == 0, PATIENCE_S, "the end of the leases")
        assert others.places(-1, CHUNKS) == []
        all_of_l1_comes_back(server, others)


def test_a_worker_dies_alone(server: ServerProcess, others: Others) -> None:
    with engine(server) as (scheduler, worker, offsets):
        worker.kill9()
        wait_until(lambda: quarantined(server) == CHUNKS * OBJECT, PATIENCE_S, "the quarantine")
        there = others.fill()
        assert not set(there.values()) & set(offsets)
        assert scheduler.ask("commit") == 0
        assert others.places(-1, CHUNKS) == []
        all_of_l1_comes_back(server, others)


def test_a_stopped_worker_wakes_up_after_its_scheduler_has_died(server: ServerProcess, others: Others) -> None:
    with engine(server) as (scheduler, worker, offsets):
        worker.signal(signal.SIGSTOP)
        scheduler.kill9()
        wait_until(lambda: quarantined(server) == CHUNKS * OBJECT, PATIENCE_S, "the quarantine")
        there = others.fill()
        worker.signal(signal.SIGCONT)
        nobody_else_gets(others, worker, offsets)
        assert worker.ask("served")
        assert others.found(there).items() <= there.items()
        worker.kill9()
        all_of_l1_comes_back(server, others)


@pytest.mark.parametrize("end", ["abort", "commit", "death"])
def test_the_places_of_a_stopped_engine_come_back(server: ServerProcess, others: Others, end: str) -> None:
    """It wakes up after its lease: the places are nobody's until it has said so, or is dead."""
    with engine(server) as (scheduler, worker, offsets):
        for each in (scheduler, worker):
            each.signal(signal.SIGSTOP)
        wait_until(lambda: quarantined(server) == CHUNKS * OBJECT, PATIENCE_S, "the quarantine")
        assert len(others.fill()) == IN_ALL - CHUNKS
        assert others.places(-1, CHUNKS) == []
        assert others.store(-1, CHUNKS) == CHUNKS, "the keys are free for another writer"
        if end == "death":
            worker.kill9()
            scheduler.kill9()
        else:
            for each in (scheduler, worker):
                each.signal(signal.SIGCONT)
            worker.ask("write", offsets, LATE)
            assert quarantined(server) > 0, "it lives and has said nothing"
            assert not scheduler.ask(end)
        wait_until(lambda: quarantined(server) == 0, PATIENCE_S, "the end of the quarantine")
        assert not set(others.places(-1, CHUNKS)) & set(offsets)
        assert others.found([-1]).keys() == {-1}, "of the other writer"
        all_of_l1_comes_back(server, others)


def test_a_server_dies_between_reserve_and_commit(server: ServerProcess) -> None:
    with engine(server) as (scheduler, worker, offsets):
        server.kill9()
        wait_until(lambda: not worker.ask("served"), PATIENCE_S, "the end of the arena")
        server.start()
        scheduler.ask("ticket")
        assert scheduler.ask("commit") == 0
        worker.ask("write", offsets, LATE)
        with server.engine_client() as client:
            others = Others(client)
            assert others.places(-1, CHUNKS) == []
            assert len(others.fill()) == IN_ALL


def killed(server: ServerProcess) -> None:
    server.kill9()
    server.start()


def taken_over(server: ServerProcess) -> None:
    assert server.take_over() == 0, server.log


@pytest.mark.parametrize(("kind", "change"), [(HeldServer, killed), (ServerProcess, taken_over)])
def test_the_next_server_gives_nothing_away_where_a_worker_of_the_last_one_writes(
    kind: type[ServerProcess], change: Callable[[ServerProcess], None]
) -> None:
    with kind(capacity="1MiB") as server, engine(server) as (scheduler, worker, offsets):
        change(server)
        assert not worker.ask("served")
        scheduler.ask("ticket")
        with server.engine_client() as client:
            others = Others(client)
            nobody_else_gets(others, worker, offsets)
            assert scheduler.ask("commit") == 0
            nobody_else_gets(others, worker, offsets)
            worker.kill9()
            all_of_l1_comes_back(server, others)


def test_a_new_session_with_the_same_server_registers_again(server: ServerProcess) -> None:
    with server.engine_client() as client:
        others = Others(client)
        before = others._instance.ticket
        assert before is not None
        kept = map_arena(before)  # as a worker that has not heard of it
        link = client._connection._link
        link.close()
        wait_until(lambda: client.usable and client.hello.session != before.session, PATIENCE_S, "a new session")
        others.ready()
        assert others._instance.ticket != before
        assert len(others.fill()) == IN_ALL
        assert kept.is_served
        del kept
        wait_until(lambda: len(server.status()["instances"]) == 1, PATIENCE_S, "the end of the session before")
        with pytest.raises(ServerGone):
            map_arena(before)


def test_a_server_that_is_stopped_holds_up_no_registration(server: ServerProcess) -> None:
    with server.engine_client(deadline_scale=0.5) as client:
        server.sigstop()
        try:
            instance = OpaqueInstance(client, objects(98))
            assert not instance.is_ready
            assert instance.ticket is None
        finally:
            server.sigcont()
        wait_until(lambda: instance.is_ready, PATIENCE_S, "the registration")
        assert not instance.is_registering
