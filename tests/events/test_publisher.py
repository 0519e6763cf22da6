"""The publisher's thread against a ledger that cannot be written for a while; its sockets are a list."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvf_events import ledger as ledgers
from kvf_events import publisher as publishers
from kvf_events.block_index import Medium
from kvf_events.history import END, Encoder, History, Numbered
from kvf_events.ledger import Ledger
from kvf_events.publisher import Publisher
from kvframework import record_ring
from kvframework.api.keys import ChunkContent
from kvframework.service import listeners
from tests.core.server.in_process import serving
from tests.events.node import BLOCK, Engine, packed, prompt, settings
from tests.events.test_announcer import TOKENS, Node
from tests.events.test_history import read
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient


class Sockets:
    def __init__(self) -> None:
        self.published: list[Numbered] = []

    def wait(self, timeout_s: float) -> tuple[int, list[Any]]:
        time.sleep(min(timeout_s, 0.01))
        return 0, []

    def publish(self, message: Numbered) -> None:
        self.published.append(message)

    def answer(self, client: bytes, message: Numbered) -> bool | None:
        raise AssertionError("nobody asks")

    def close(self) -> None:
        pass


class NeverDone(Sockets):
    """A reader that takes nothing but the end of its answer, and asks again then: as Dynamo does, whose queue has later
    news by then."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.ends = 0
        self._times = times
        self._questions = [(b"reader", 0)]

    def wait(self, timeout_s: float) -> tuple[int, list[Any]]:
        time.sleep(min(timeout_s, 0.001))
        asked, self._questions = self._questions, []
        return 0, asked

    def answer(self, client: bytes, message: Numbered) -> bool | None:
        if message is not END:
            return False
        self.ends += 1
        if self.ends < self._times:
            self._questions.append((client, 0))
        return True


class Disk:
    """Stands for `os.write` of the ledger: with `room`, that many bytes are left."""

    def __init__(self) -> None:
        self.room: int | None = None

    def write(self, fd: int, data: memoryview) -> int:
        if self.room is None:
            return os.write(fd, data)
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(fd, data[: self.room])
        self.room -= written
        return written


@contextmanager
def publishing(node: Node, path: Path, sockets: Any = None) -> Iterator[Publisher]:
    ledger = Ledger(path, keeps=False)
    encoder = Encoder("map", BLOCK)
    publisher = Publisher(
        node.announcer,
        ledger,
        ledger.open(),
        lambda first: History(encoder, ("a",), first),
        sockets or Sockets(),
        batch_s=0.01,
    )
    thread = threading.Thread(target=publisher.run, args=(node.records,))
    thread.start()
    try:
        yield publisher
    finally:
        # As a server that is killed: it tells no removal.
        ledger.keeps = True
        node.records.end(handed_over=False)
        thread.join(10)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(ledgers, "os", type("os", (), {**vars(os), "write": staticmethod(made.write)}))
    monkeypatch.setattr(publishers, "_WRITE_AGAIN_S", 0.0)
    return made


def store(node: Node, publisher: Publisher, tokens: list[int]) -> set[int]:
    """Store a prompt; return all that is announced once it is."""
    before = sum(publisher._announcer.index.blocks.values())
    node.store(node.key(tokens), ChunkContent(packed(tokens)))
    wait_until(lambda: sum(publisher._announcer.index.blocks.values()) > before, what="the announcement")
    (of,) = publisher._announcer.index.announced().values()
    return of


@pytest.mark.parametrize("room", [0, 5, 40])
def test_a_disk_that_was_full_leaves_a_ledger_that_is_whole(
    room: int, disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node, path = Node(), tmp_path / "l"
    with publishing(node, path) as publisher:
        store(node, publisher, TOKENS)
        wait_until(lambda: not publisher.problem and publisher.ledger_bytes, what="the ledger")
        disk.room = room
        store(node, publisher, [each + 1000 for each in TOKENS])
        wait_until(lambda: "No space" in publisher.problem, what="the problem")
        disk.room = None
        announced = store(node, publisher, [each + 2000 for each in TOKENS])
        wait_until(lambda: not publisher.problem, what="its end")
        number = publisher.next_number
    found = read(path)
    assert found.announced == {("m", Medium.CPU): announced}
    assert found.next >= number
    assert list(tmp_path.glob("*.new")) == []
    assert [each.levelno for each in caplog.records if "ledger" in each.getMessage()] == [logging.ERROR, logging.INFO]


def test_who_asks_again_when_an_answer_is_ended_by_the_stop_gets_an_end_too(tmp_path: Path) -> None:
    sockets = NeverDone(times=3)
    with publishing(Node(), tmp_path / "l", sockets) as publisher:
        wait_until(lambda: publisher.counters["replays"], what="the question")
        assert not sockets.ends
    assert sockets.ends == 3


MOST_BYTES = 40_000


@pytest.fixture
def hanging_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A ledger's disk, which answers once this is set."""
    answers, write = threading.Event(), Ledger.write

    def hang(self: Ledger, *args: object) -> None:
        answers.wait()
        write(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Ledger, "write", hang)
    yield answers
    answers.set()


def test_a_publisher_that_hangs_costs_engines_nothing_and_says_so(
    hanging_disk: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_ring, "MOST_BYTES", MOST_BYTES)
    monkeypatch.setattr(publishers, "HANGS_S", 0.2)
    tmp_path.chmod(0o700)
    with serving(*settings(tmp_path), capacity="64MiB") as server, WireClient(server.endpoint) as client:
        engine = Engine(client)

        def events() -> dict[str, object]:
            return client.status()["events"]

        for number in range(60):
            engine.store(prompt(number, 8))
            assert engine.hit(prompt(number, 8))
        wait_until(lambda: "hangs" in str(events()["problem"]), what="the problem")
        assert any("hangs" in each["fact"] for each in client.status()["problems"])
        assert server._listeners.ring._bytes <= MOST_BYTES
        assert client.status()["events"]["counters"]["dropped"] > 0
        hanging_disk.set()
        wait_until(lambda: not events()["problem"], what="its end")
        engine.store(prompt(100, 8))
        wait_until(lambda: events()["blocks"]["CPU"] > 0, what="what is announced")  # type: ignore[index]


def test_a_server_stops_though_its_publisher_hangs(
    hanging_disk: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "STOP_S", 0.2)
    tmp_path.chmod(0o700)
    with serving(*settings(tmp_path)) as server, WireClient(server.endpoint) as client:
        Engine(client).store(prompt(1, 2))
