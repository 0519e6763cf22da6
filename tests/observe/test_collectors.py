"""Collectors that are away, refuse or hang, a flood of sampled requests, and a server that starts again. Real
processes. A hundred slow scrapers, silent clients and nonsense: the server is asked once a second as before, and an
honest scraper is served."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families as parsed

from kvframework.wire import messages as m
from tests.support.collector import Collector
from tests.support.observe_process import SLOW_S, ObserveProcess
from tests.support.ports import free_port
from tests.support.processes import send
from tests.support.server_process import ServerProcess, fixture_of, server_fixture
from tests.support.waiting import wait_until
from tests.support.wire_client import key_for

PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"
TOKENS = list(range(2048))


collector = fixture_of(Collector)
server = server_fixture(scope="module")


def traced(observe: ObserveProcess) -> dict[str, float]:
    families = {family.name: family for family in parsed(observe.get("/metrics").text)}
    return {each.labels["outcome"]: each.value for each in families["kvframework_traced_requests"].samples}


def look_up(server: ServerProcess, trace: str, times: int = 1) -> None:
    with server.client() as client:
        key = key_for(client.register(), TOKENS, trace=trace)
        for _ in range(times):
            client.lookup(key)


def test_a_header_that_is_none_is_not_quoted(
    server: ServerProcess, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization: Bearer a-secret")
    with ObserveProcess(server.endpoint, "--traces", collector.url) as observe:
        wait_until(lambda: "ignored a header in OTEL_EXPORTER_OTLP_HEADERS that is" in observe.log, SLOW_S, "the line")
        assert "a-secret" not in observe.log


@pytest.mark.parametrize("how", ["away", "500"])
def test_a_collector_that_takes_nothing_is_a_count_and_a_line(
    server: ServerProcess, collector: Collector, how: str
) -> None:
    url = f"http://127.0.0.1:{free_port()}" if how == "away" else collector.url
    collector.status = 200 if how == "away" else int(how)
    with ObserveProcess(server.endpoint, "--traces", url) as observe:
        wait_until(lambda: traced(observe) == {"exported": 0, "failed": 0, "forgotten": 0}, SLOW_S, "a metric")
        look_up(server, PARENT)
        wait_until(lambda: traced(observe)["failed"] == 1, SLOW_S, "the failure")
        wait_until(lambda: "does not accept spans:" in observe.log, SLOW_S, "the line")
        assert observe.get("/livez").status == 200
        if how != "away":
            collector.status = 200
            look_up(server, PARENT)
            wait_until(lambda: traced(observe)["exported"] == 1, SLOW_S, "the next span")
            wait_until(lambda: "accepts spans again" in observe.log, SLOW_S, "the line")
            assert [each.name for each in collector.spans] == ["kvframework.lookup"]


def test_a_collector_that_hangs_holds_up_neither_metrics_nor_the_end(
    server: ServerProcess, collector: Collector
) -> None:
    collector.hold()
    with ObserveProcess(server.endpoint, "--traces", collector.url) as observe:
        wait_until(lambda: observe.get("/readyz").status == 200, SLOW_S, "the server")
        look_up(server, PARENT)
        wait_until(lambda: collector.requests, SLOW_S, "the spans")
        assert observe.get("/metrics").status == 200
        observe.process.terminate()
        assert observe.process.wait(SLOW_S) == 0, observe.log


def test_a_flood_is_bounded_and_what_was_forgotten_is_counted(server: ServerProcess, collector: Collector) -> None:
    with ObserveProcess(server.endpoint, "--traces", collector.url) as observe:
        look_up(server, PARENT)
        wait_until(lambda: traced(observe)["exported"] == 1, SLOW_S, "the first span")
        send(observe.process.pid, signal.SIGSTOP)
        look_up(server, PARENT, 3000)
        look_up(server, "", 2000)
        send(observe.process.pid, signal.SIGCONT)
        wait_until(lambda: sum(traced(observe).values()) == 3001, SLOW_S, "the flood's end")
        outcome = traced(observe)
    assert outcome["failed"] == 0
    # An answer that was under way may have had some of them.
    assert 3000 - 2 * m.MAX_RECENT <= outcome["forgotten"] <= 3000 - m.MAX_RECENT
    assert len(collector.spans) == outcome["exported"]
    assert len({each.id for each in collector.spans}) == len(collector.spans)


def test_the_next_server_is_traced_too(collector: Collector) -> None:
    with ServerProcess() as server, ObserveProcess(server.endpoint, "--traces", collector.url) as observe:
        wait_until(lambda: observe.get("/readyz").status == 200, SLOW_S, "the server")
        look_up(server, PARENT)
        wait_until(lambda: len(collector.spans) == 1, SLOW_S, "the span")
        server.kill9()
        server.start()
        look_up(server, PARENT)
        wait_until(lambda: len(collector.spans) == 2, SLOW_S, "the span of the next server")
        # It is counted once the collector has answered.
        wait_until(lambda: traced(observe)["exported"] == 2, SLOW_S, "the count")
        assert traced(observe) == {"exported": 2, "failed": 0, "forgotten": 0}


SLOW_SCRAPERS = 100
NONSENSE = b"\x16\x03\x01" + b"\0" * 1000


def polls(text: str) -> float:
    (family,) = (family for family in parsed(text) if family.name == "kvframework_polls")
    return sum(sample.value for sample in family.samples)


def test_a_crowd_costs_the_server_nothing() -> None:
    with ServerProcess() as server, ObserveProcess(server.endpoint) as observe, contextlib.ExitStack() as crowd:

        def status() -> Any:
            return json.loads(observe.get("/status").text)

        wait_until(lambda: observe.get("/readyz").status == 200, SLOW_S, "readiness")
        before, polls_before = status(), polls(observe.get("/metrics").text)
        place = (urlsplit(observe.url).hostname, urlsplit(observe.url).port)
        for number in range(SLOW_SCRAPERS):
            sock = crowd.enter_context(socket.create_connection(place, timeout=SLOW_S))
            if number % 3 == 0:
                sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")  # and reads no answer
            elif number % 3 == 1:
                sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: local")  # and sends no more
            else:
                sock.sendall(NONSENSE)
        stop = threading.Event()
        statuses: list[int] = []

        def scrape() -> None:
            while not stop.is_set():
                statuses.append(observe.get("/metrics").status)

        scrapers = [threading.Thread(target=scrape) for _ in range(4)]
        for scraper in scrapers:
            scraper.start()
        uptime = before["server"]["uptime_s"]
        wait_until(lambda: status()["server"]["uptime_s"] > uptime + 5, SLOW_S, "five seconds")
        stop.set()
        for scraper in scrapers:
            scraper.join(SLOW_S)
        after, polls_after = status(), polls(observe.get("/metrics").text)
        seconds = after["server"]["uptime_s"] - uptime
        assert set(statuses) == {200}
        assert len(statuses) > polls_after - polls_before
        # One more a second has begun, and one may have ended since.
        assert polls_after - polls_before <= seconds + 3
        assert after["server"]["boot_id"] == before["server"]["boot_id"]
        assert len(after["messaging"]["sessions"]) == len(before["messaging"]["sessions"])
        assert observe.process.poll() is None
