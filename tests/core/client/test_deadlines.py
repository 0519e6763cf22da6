"""A busy or slow server costs no store: each call waits as long as it is worth, and what is lost is told and shown."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvf_dev.testing.faults import FaultProxy
from kvframework.api.transport import StoreOutcome
from kvframework.client import EngineSpeed, KVClient
from kvframework.errors import ConfigFieldError, DeadlineExceeded
from kvframework.wire import messages as m
from kvframework.wire.protocol import LOCAL, SCALE_VARIABLE, TCP, deadlines_for
from tests.core.survival.holdings import held
from tests.core.wire_path.remote import remote_server
from tests.support.engines import PagedEngine
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.torch


PATIENCE_S = 60.0
PAUSE_S = 0.3
BLOCKS = [list(range(32))]
INSTANCES = itertools.count(1)


@contextmanager
def stopped(server: ServerProcess) -> Iterator[None]:
    server.sigstop()
    try:
        yield
    finally:
        server.sigcont()


@contextmanager
def engine_of(server: ServerProcess, revision: str) -> Iterator[PagedEngine]:
    with KVClient(server.endpoint, name=revision) as client:
        assert client.wait_up(PATIENCE_S)
        engine = PagedEngine(client, next(INSTANCES), revision=revision)
        yield engine
        engine.worker.close()


@contextmanager
def paused(server: ServerProcess, seconds: float) -> Iterator[None]:
    """The server is stopped at once, and goes on after that time."""
    server.sigstop()
    goes_on = threading.Timer(seconds, server.sigcont)
    goes_on.start()
    try:
        yield
    finally:
        goes_on.join()


SLOW_ENGINE = EngineSpeed(tokens_per_s=100.0)  # 5 s for 512 tokens
SILENT_S = 2.0


def test_a_lookup_waits_as_long_as_its_prompt_is_worth(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same silence is a hit for an engine that would compute for longer, and a counted miss for a quick one."""
    monkeypatch.setenv(SCALE_VARIABLE, "10")  # a lookup waits 1 s, and 10 s at most
    with engine_of(server, "waits") as engine:
        request = engine.request(list(range(512)))
        assert engine.worker.submit_store(request, 0, 512, BLOCKS).result(PATIENCE_S).ok
        with paused(server, SILENT_S):
            found = engine.scheduler.lookup(request, speed=SLOW_ENGINE)
        assert (found.hit_tokens, found.unanswered, engine.scheduler.failures) == (512, False, 0)
        engine.scheduler.free(found)
        with paused(server, SILENT_S):
            began = time.monotonic()
            found = engine.scheduler.lookup(request)
            assert engine.scheduler.lookup(request, speed=SLOW_ENGINE).unanswered, "at once, until the server answers"
            assert time.monotonic() - began < SILENT_S
        assert (found.hit_tokens, found.unanswered, engine.scheduler.failures) == (0, True, 2)
        wait_until(lambda: engine.client.usable, PATIENCE_S, "the answer")
        assert engine.scheduler.lookup(request).hit_tokens == 512

        def recent() -> list[dict[str, Any]]:
            return [each for each in server.status()["losses"]["recent"] if each["client"] == "waits"]

        wait_until(recent, PATIENCE_S, "the report of the losses")
        (lost,) = recent()
        assert (lost["lookups"], lost["codes"]) == (2, {DeadlineExceeded.code: 2})


def test_a_server_that_stops_again_and_again_costs_one_long_wait(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long waits in vain have their share of the engine's time, however often the server seems to be back."""
    monkeypatch.setenv(SCALE_VARIABLE, "3")  # a lookup waits 0.3 s, and 3 s at most
    with engine_of(server, "again") as engine:
        request = engine.request(list(range(512)))
        took = []
        for _ in range(4):
            wait_until(lambda: engine.client.usable, PATIENCE_S, "the answer")
            with stopped(server):
                began = time.monotonic()
                assert engine.scheduler.lookup(request, speed=SLOW_ENGINE).unanswered
                took.append(time.monotonic() - began)
        assert took[0] >= 3
        assert max(took[1:]) < 2
        wait_until(lambda: engine.client.usable, PATIENCE_S, "the answer")
        assert not engine.scheduler.lookup(request).unanswered


def test_the_longest_wait_of_a_lookup() -> None:
    assert LOCAL.of_lookup(0.0) == LOCAL.lookup_s
    assert LOCAL.of_lookup(0.5) == LOCAL.lookup_s + 0.5
    assert LOCAL.of_lookup(1e9) == LOCAL.lookup_most_s == 1.0
    assert deadlines_for("tcp://host:1", 5.0).of_lookup(0.0) == pytest.approx(5 * TCP.lookup_s)
    assert deadlines_for("tcp://host:1", 5.0).of_lookup(1e9) == 5 * TCP.lookup_most_s


class StopsIt:
    """An event behind which the server is stopped: the store has its ranges, and COMMIT is to come."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server

    def synchronize(self) -> None:
        self._server.sigstop()


@pytest.mark.parametrize("at", ["PREPARE_STORE", "COMMIT_STORE"])
def test_a_store_survives_a_pause_and_the_engine_goes_on_meanwhile(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    monkeypatch.setenv(SCALE_VARIABLE, "5")  # an engine's thread waits 0.25 s, a store 10 s
    with engine_of(server, at) as engine:
        request = engine.request(list(range(512)))
        event = StopsIt(server) if at == "COMMIT_STORE" else None
        try:
            if event is None:
                server.sigstop()
            future = engine.worker.submit_store(request, 0, 512, BLOCKS, event=event)  # type: ignore[arg-type]
            assert not future.query(), "the engine's thread is back before the server answers"
            time.sleep(PAUSE_S)
        finally:
            server.sigcont()
        assert future.result(PATIENCE_S) == StoreOutcome(stored=2)
        wait_until(lambda: engine.client.usable, PATIENCE_S)
        assert engine.scheduler.lookup(request).hit_tokens == 512


def test_while_the_server_is_silent_stores_wait_for_it_and_cost_the_engine_one_moment(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SCALE_VARIABLE, "5")
    with engine_of(server, "many") as engine:
        with stopped(server):
            assert engine.scheduler.lookup(engine.request([1] * 512)).hit_tokens == 0
            assert not engine.client.usable, "lookups are misses at once from here on"
            began = time.monotonic()
            requests = [engine.request([number] * 512, f"r{number}") for number in range(10, 30)]
            futures = [engine.worker.submit_store(request, 0, 512, BLOCKS) for request in requests]
            assert time.monotonic() - began < 20 * LOCAL.scaled(5).engine_s
        assert [future.result(PATIENCE_S).ok for future in futures] == [True] * 20


def test_what_is_lost_is_shown_also_when_the_client_has_ended_since(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SCALE_VARIABLE, "0.2")  # a store waits 0.4 s, a lookup 20 ms
    with engine_of(server, "loses") as engine:
        request = engine.request(list(range(512)))
        with stopped(server):
            began = time.monotonic()
            futures = [engine.worker.submit_store(request, 0, 512, BLOCKS) for _ in range(3)]
            assert engine.scheduler.lookup(request).hit_tokens == 0
            assert [future.result(PATIENCE_S).ok for future in futures] == [False] * 3
            assert time.monotonic() - began >= 0.3, "it has waited for what it is worth"
        lost_bytes = 3 * 2 * engine.worker.registration.desc.nbytes  # type: ignore[union-attr]
    status = server.status()
    (recent,) = [each for each in status["losses"]["recent"] if each["client"] == "loses"]
    assert (recent["stores"], recent["bytes"]) == (3, lost_bytes)
    assert recent["lookups"] >= 1
    assert set(recent["codes"]) == {DeadlineExceeded.code}
    assert status["losses"]["stores"] >= 3
    (fact,) = [each["fact"] for each in status["problems"] if "'loses'" in each["fact"]]
    assert "3 stores" in fact
    assert "3 stores" in fact
    assert SCALE_VARIABLE in fact, "what to do about it"
    with server.client() as watcher:
        wait_until(lambda: held(watcher) == {}, PATIENCE_S, "what came too late to be given back")


def test_the_error_names_the_setting(server: ServerProcess) -> None:
    with engine_of(server, "hint") as engine, stopped(server):
        with pytest.raises(DeadlineExceeded, match=r"no answer within 0\.01 s") as caught:
            engine.client.request("NOOP", m.Empty(), m.Empty, timeout=0.01)
        assert "deadline_scale" in caught.value.hint
        assert SCALE_VARIABLE in caught.value.hint


def test_the_first_store_over_tcp_survives_a_slow_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCALE_VARIABLE, "4")
    with remote_server() as server, FaultProxy(("127.0.0.1", int(server.tcp.rpartition(":")[2]))) as proxy:
        proxy.inject("slow", 0.1)
        keys = server.keys.of("client") if server.keys else None
        with KVClient(f"tcp://127.0.0.1:{proxy.port}", curve=keys) as client:
            assert client.wait_up(PATIENCE_S)
            engine = PagedEngine(client)
            request = engine.request(list(range(512)))
            began = time.monotonic()
            future = engine.worker.submit_store(request, 0, 512, BLOCKS)
            assert not future.query(), "nothing of it in the engine's thread"
            assert future.result(PATIENCE_S).ok
            assert time.monotonic() - began > 0.2, "an answer and a handshake"
            assert server.process.status()["losses"]["stores"] == 0


def test_silence_over_tcp_is_not_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCALE_VARIABLE, "0.5")  # in doubt after 0.75 s, gone after 5 s
    with remote_server(curve=False) as server, KVClient(server.tcp) as client:
        assert client.wait_up(PATIENCE_S)
        link = client._connection._link
        with stopped(server.process):
            wait_until(lambda: not client.usable, PATIENCE_S, "the doubt")
            time.sleep(0.5)
        wait_until(lambda: client.usable, PATIENCE_S, "the answer")
        assert client._connection._link is link


def test_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SCALE_VARIABLE, raising=False)
    assert deadlines_for("ipc:///s") == LOCAL
    assert deadlines_for("tcp://host:1") == TCP
    assert deadlines_for("ipc:///s", 2.0).store_s == 2 * LOCAL.store_s
    assert deadlines_for("ipc:///s", 0.5).lookup_s == LOCAL.lookup_s / 2
    assert deadlines_for("ipc:///s", 0.5).transfer_s == LOCAL.transfer_s, "the server's own deadline speaks first"
    monkeypatch.setenv(SCALE_VARIABLE, "3")
    assert deadlines_for("ipc:///s").lookup_s == pytest.approx(3 * LOCAL.lookup_s)
    for wrong in ("0", "many", "nan", "1e9"):
        monkeypatch.setenv(SCALE_VARIABLE, wrong)
        with pytest.raises(ConfigFieldError, match=SCALE_VARIABLE):
            KVClient("ipc:///nowhere/s")
    for wrong in (0, -1.0, 101, "2"):
        with pytest.raises(ConfigFieldError, match="deadline_scale") as refused:
            KVClient("ipc:///nowhere/s", deadline_scale=wrong)  # type: ignore[arg-type]
        assert refused.value.available == "0.1 to 100"
        assert "twice as long" in refused.value.hint


def test_a_stuck_server_holds_up_a_close_only_as_long_as_a_setup(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine copies by itself: nothing of the server can be in its memory."""
    monkeypatch.setenv(SCALE_VARIABLE, "0.5")
    with engine_of(server, "closes") as engine, stopped(server):
        began = time.monotonic()
        engine.worker.close()
        assert time.monotonic() - began < 15
    assert ", whose memory the server may still use" not in caplog.text
