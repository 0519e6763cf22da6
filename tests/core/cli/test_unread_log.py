"""A server whose log is not read, or cannot be written, serves and ends like any other."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvframework.wire import messages as m
from tests.core.registry.fake_distributions import install
from tests.support.full_pipe import full_pipe
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

LIMIT_S = 5.0

TALKING = """
    import sys
    from kvframework.api.requests import Handler, Message, RequestSpec, RequestsProvider, hookimpl
    class Talk(Message, frozen=True):
        pass
    def talk(_client, payload, _buffers):
        print("x" * 200_000)
        print("y" * 200_000, file=sys.stderr, flush=True)
        return payload
    def create_requests(options, services):
        print("a plugin begins")
        return [Handler(RequestSpec("talking.TALK", Talk, Talk), talk)]
    @hookimpl
    def kvf_request_handlers():
        return [RequestsProvider(name="talking", summary="", create=create_requests)]
"""


@pytest.fixture
def talking(site: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A plugin that prints more than a pipe holds: the setting that configures it."""
    install(site, "acme-talking", {"requests.talking": "acme_talking"}, {"acme_talking": TALKING})
    monkeypatch.setenv("PYTHONPATH", str(site))
    return "requests.0.use=talking"


@contextmanager
def full() -> Iterator[int]:
    with full_pipe() as (_, writer):
        yield writer


@contextmanager
def closed() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@contextmanager
def full_disk() -> Iterator[int]:
    fd = os.open("/dev/full", os.O_WRONLY)
    yield fd
    os.close(fd)


def works(client: WireClient, instances: int = 20) -> None:
    """Registrations, each with lines in the log, stores, lookups."""
    for number in range(1, instances + 1):
        tokens = range(number, number + 256)
        key = key_for(client.register(number), tokens)
        client.store(key, b"x", number)
        assert client.lookup(key).hit_tokens == 256
        client.call("UNREGISTER_KV_CACHE", m.Unregister(number))


def end(server: ServerProcess) -> tuple[int, float]:
    began = time.monotonic()
    return server.stop(), time.monotonic() - began


@pytest.mark.parametrize("output", [full, closed, full_disk])
def test_a_log_that_goes_nowhere_stops_nothing(output: object, talking: str) -> None:
    with output() as fd, ServerProcess(talking, "log.level=debug", output=fd) as server:  # type: ignore[operator]
        with server.client() as client:
            works(client)
            client.send("talking.TALK", m.Empty())
            client.call("NOOP", m.Empty())
            log = client.status()["log"]
            assert log["waiting"] + log["dropped"] > 40
        status, seconds = end(server)
        assert status == 0
        assert seconds < LIMIT_S


def test_the_status_says_that_the_log_cannot_be_written() -> None:
    with full_disk() as fd, ServerProcess(output=fd) as server, server.client() as client:
        client.register()
        wait_until(lambda: client.status()["log"]["waiting"] == 0, what="the log's thread to give up on each line")
        document = client.status()
        assert document["log"]["dropped"] >= 3
        assert {"where": "log", "fact": "the log cannot be written: No space left on device"} in document["problems"]


def test_a_log_that_is_read_again_has_all_that_waited(talking: str) -> None:
    with full_pipe() as (reader, writer), ServerProcess(talking, output=writer) as server:
        with server.client() as client:
            works(client, 5)
            client.status()
        os.set_blocking(reader, False)
        text = b""

        def read() -> bool:
            nonlocal text
            try:
                text += os.read(reader, 1 << 16)
            except BlockingIOError:
                return False
            return b"client test" in text

        wait_until(read, what="the last line")
        said = text.decode()
        assert "stderr: a plugin begins\n" in said
        assert said.count("registered") >= 10
        assert "lines are missing" not in said


def test_a_crash_ends_a_server_whose_log_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    with full_pipe() as (_, writer), ServerProcess(output=writer) as server:
        server.process.send_signal(signal.SIGSEGV)
        assert server.process.wait(LIMIT_S) == -signal.SIGSEGV
        server.process = None
