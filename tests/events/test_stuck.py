"""A publisher's thread that hangs, as at a disk that answers no more: engines do not notice, and memory is bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvf_events import publisher as publishers
from kvf_events.ledger import Ledger
from kvframework import record_ring
from kvframework.service import listeners
from tests.core.server.in_process import serving
from tests.events.node import Engine, prompt, settings
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient

MOST_BYTES = 40_000


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A ledger's disk, which answers once this is set."""
    answers, write = threading.Event(), Ledger.write

    def hang(self: Ledger, *args: object) -> None:
        answers.wait()
        write(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Ledger, "write", hang)
    yield answers
    answers.set()


def test_a_publisher_that_hangs_costs_engines_nothing_and_says_so(
    disk: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_ring, "MOST_BYTES", MOST_BYTES)
    monkeypatch.setattr(publishers, "HANGS_S", 0.2)
    tmp_path.chmod(0o700)
    with serving(*settings(tmp_path), capacity="64MiB") as server, WireClient(server.endpoint) as client:
        engine = Engine(client)

        def events() -> dict[str, object]:
            found: dict[str, object] = client.status()["events"]
            return found

        for number in range(60):
            engine.store(prompt(number, 8))
            assert engine.hit(prompt(number, 8))
        wait_until(lambda: "hangs" in str(events()["problem"]), what="the problem")
        assert any("hangs" in each["fact"] for each in client.status()["problems"])
        assert server._listeners.ring._bytes <= MOST_BYTES
        assert client.status()["events"]["counters"]["dropped"] > 0
        disk.set()
        wait_until(lambda: not events()["problem"], what="its end")
        engine.store(prompt(100, 8))
        wait_until(lambda: events()["blocks"]["CPU"] > 0, what="what is announced")  # type: ignore[index]


def test_a_server_stops_though_its_publisher_hangs(
    disk: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "STOP_S", 0.2)
    tmp_path.chmod(0o700)
    with serving(*settings(tmp_path)) as server, WireClient(server.endpoint) as client:
        Engine(client).store(prompt(1, 2))
