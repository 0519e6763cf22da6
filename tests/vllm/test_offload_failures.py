"""The two halves of `KvFrameworkOffloading` when a session, a server or vLLM's cache ends under them. The server is
real."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvframework.client import ArenaTicket, KVClient, OpaqueInstance, OpaqueObjects
from tests.support.server_process import ServerProcess, client_fixture, server_fixture
from tests.support.waiting import wait_until
from tests.vllm.model import prompt
from tests.vllm.modelless import Cache, engine
from tests.vllm.stand_ins import FakeRequest
from tests.vllm.test_offload_kinds_bytes import full

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

PATIENCE_S = 60.0


server = server_fixture(capacity="4MiB")
client = client_fixture(engine=True)


@pytest.fixture
def instance(client: KVClient) -> OpaqueInstance:
    return OpaqueInstance(client, OpaqueObjects(1, "tiny", (4096,), 16, "p"))


def ticket_of(instance: OpaqueInstance) -> ArenaTicket:
    wait_until(lambda: instance.ticket is not None, PATIENCE_S, "the registration")
    ticket = instance.ticket
    assert ticket is not None
    return ticket


def mapped_arenas() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:kvframework-l1")


def test_places_of_another_session_with_the_same_server_are_nobodys(client: KVClient, instance: OpaqueInstance) -> None:
    from kvf_vllm.offloading.worker import ServedArena

    worker, before = ServedArena(), ticket_of(instance)
    worker.follow(before)
    assert worker.of(before.session) is not None
    link = client._connection._link
    assert link is not None
    link.close()
    wait_until(lambda: client.usable and client.hello.session != before.session, PATIENCE_S, "a new session")
    after = ticket_of(instance)
    assert after.boot_id == before.boot_id
    worker.follow(after)
    assert worker.of(before.session) is None
    assert worker.of(after.session) is not None


def test_a_server_in_doubt_keeps_the_arena_mapped(instance: OpaqueInstance) -> None:
    from kvf_vllm.offloading.worker import ServedArena

    worker, ticket = ServedArena(), ticket_of(instance)
    worker.follow(ticket)
    arena = worker.of(ticket.session)
    worker.follow(None)
    assert arena is not None
    assert worker.of(ticket.session) is arena


def test_an_idle_worker_lets_go_of_the_memory_of_a_dead_server(server: ServerProcess, instance: OpaqueInstance) -> None:
    from kvf_vllm.offloading.worker import ServedArena

    worker = ServedArena()
    worker.follow(ticket_of(instance))
    both = mapped_arenas()
    assert both >= 2
    server.kill9()
    wait_until(lambda: mapped_arenas() == both - 2, PATIENCE_S, "the end of both mappings")


def manager() -> Any:
    from kvf_vllm.adapters import AdapterNames
    from kvf_vllm.offloading.manager import ArenaManager
    from kvf_vllm.options import VllmOptions
    from kvf_vllm.weights import EngineWeights

    return ArenaManager(
        VllmOptions(),
        lambda _names: pytest.fail("nothing is registered here"),
        unit_tokens=16,
        workers=1,
        loads=True,
        stores=True,
        unread=False,
        adapters=AdapterNames(1, by_path=True),
        weights=EngineWeights(caches_prefixes=True),
    )


def test_a_reset_forgets_loads_whose_ends_vllm_no_longer_tells(server: ServerProcess) -> None:
    from types import SimpleNamespace

    made = manager()
    context = SimpleNamespace(req_id="r")
    made.came(FakeRequest("r", list(range(64))))
    made._tracked["r"].loads.append(("a lease", 0.0))
    made.on_request_finished(context)
    assert made._tracked, "its load is under way"
    made.reset_cache()
    assert not made._tracked
    made.complete_load([], context)
    assert not made.tally.take().get("errors")


def test_of_a_server_that_is_silent_a_step_waits_for_one_answer(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvf_vllm.offloading import searches

    monkeypatch.setattr(searches, "ANSWER_S", 2.0)
    with engine(Cache(full(4)), server.endpoint) as one:
        one.answer(1, prompt(100, seed=1))
        server.sigstop()
        try:
            for number in range(8):
                one.ask(2 + number, prompt(100, seed=2 + number))
            began = time.monotonic()
            one.core.step()
            assert 2.0 <= time.monotonic() - began < 5.0
        finally:
            server.sigcont()
        while one.core.scheduler.has_requests():
            one.core.step()
        # The server answers again, and is waited for again.
        one.settle()
        one.core.reset_prefix_cache()
        assert one.answer(2, prompt(100, seed=2)).end == 64


@pytest.mark.parametrize("fault", ["kill9", "sigstop"])
def test_no_step_lasts_as_long_as_a_call_to_a_server_that_does_not_answer(server: ServerProcess, fault: str) -> None:
    """Calls may last for minutes here, see `modelless`."""
    steps = []
    with engine(Cache(full(4)), server.endpoint) as one:
        one.answer(1, prompt(100, seed=1))
        one.settle()
        one.core.reset_prefix_cache()
        getattr(server, fault)()
        try:
            # A hit, chunks to be stored, and blocks to be decoded into.
            names = [one.ask(number, prompt(200, seed=number), most=80) for number in range(1, 5)]
            while one.core.scheduler.has_unfinished_requests():
                began = time.monotonic()
                one.core.step()
                steps.append(time.monotonic() - began)
        finally:
            if fault == "sigstop":
                server.sigcont()
        loaded = [one.executor.loaded[name] for name in names]
    assert [(each.end, each.wrong) for each in loaded] == [(0, [])] * 4
    assert len(steps) > 80
    assert max(steps) < 2.5


def test_a_load_waits_for_no_store(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvf_vllm.offloading import worker

    copy, halted, goes_on, went_on = worker.move, threading.Event(), threading.Event(), list[bool]()

    def halting(runs: Any, arena: Any, *, storing: bool) -> None:
        if storing:
            halted.set()
            went_on.append(goes_on.wait(PATIENCE_S))
        copy(runs, arena, storing=storing)

    with engine(Cache(full(4)), server.endpoint, {"kvframework.load": "async"}) as one:
        one.answer(1, prompt(100, seed=1))
        one.settle()
        one.core.reset_prefix_cache()
        monkeypatch.setattr(worker, "move", halting)
        one.ask(2, prompt(100, seed=2))
        while not halted.is_set():
            one.core.step()
        name = one.ask(1, prompt(100, seed=1))
        while one.core.scheduler.has_unfinished_requests():
            one.core.step()
        goes_on.set()
        one.settle()
    assert one.executor.loaded[name].end == 64
    assert all(went_on)


def steps(one: Any) -> None:
    """Step as often as vLLM does: no longer than it has requests, or the connector has work."""
    deadline = time.monotonic() + PATIENCE_S
    while one.core.scheduler.has_requests():
        assert time.monotonic() < deadline, "vLLM steps on and on"
        one.core.step()


def test_an_idle_engine_ends_a_store_that_a_reset_has_cut_off(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvf_vllm.offloading import worker

    copy, halted, goes_on = worker.move, threading.Event(), threading.Event()

    def halting(runs: Any, arena: Any, *, storing: bool) -> None:
        halted.set()
        goes_on.wait(PATIENCE_S)
        copy(runs, arena, storing=storing)

    with engine(Cache(full(4)), server.endpoint) as one:
        one.answer(1, [1, 2, 3])
        monkeypatch.setattr(worker, "move", halting)
        one.ask(1, prompt(100, seed=1))
        while not halted.is_set() or one.core.scheduler.has_unfinished_requests():
            one.core.step()
        one.core.reset_prefix_cache(reset_connector=True)
        assert server.status()["l1"]["write_leases"] == 1
        goes_on.set()
        steps(one)
        wait_until(lambda: server.status()["l1"]["write_leases"] == 0, PATIENCE_S, "the end of the store")
        assert server.status()["l1"]["objects"] == 0


def test_an_idle_engine_tells_of_its_last_store(server: ServerProcess) -> None:
    from vllm.config.kv_events import KVEventsConfig

    events = []
    told = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with engine(Cache(full(4), engine={"kv_events_config": told}), server.endpoint) as one:
        take = one.connector.take_events

        def taken() -> Any:
            events.extend(new := list(take()))
            return new

        one.connector.take_events = taken
        one.ask(1, prompt(100, seed=1))
        steps(one)
    assert [(type(event).__name__, event.medium) for event in events] == [("BlockStored", "CPU")]
