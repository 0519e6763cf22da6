"""A hundred slow scrapers, silent clients and nonsense: the server is asked once a second as before, and an honest
scraper is served."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families as parsed

from tests.support.observe_process import SLOW_S, ObserveProcess
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

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
