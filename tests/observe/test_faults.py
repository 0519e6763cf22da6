"""Faults at real servers: /livez and /readyz answer what the row in docs/operations.md promises, and what the alert of
that row looks at is counted."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvf_observe.poller import Observed, Poller
from kvframework.client.status_source import StatusSource
from kvframework.errors import KVFrameworkError
from kvframework.wire import messages as m
from tests.core.survival.faulty_server import answer, faulty_server, send
from tests.observe import answers
from tests.support.ports import free_port
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

PROMISED = answers.promised()
SLOW_S = 60.0
CHUNK = list(range(256))


class Eye:
    def __init__(self, endpoint: str) -> None:
        self._source = StatusSource(endpoint, 5.0, name="observe")
        self._poller = Poller(self._source, lambda _observed: None)
        self.healthy = self.wait(lambda observed: observed.document is not None, "the healthy server")

    def poll(self) -> Observed:
        return self._poller.poll()

    def wait(self, condition: Callable[[Observed], Any], what: str) -> Observed:
        seen = [self.poll()]

        def holds() -> bool:
            seen.append(self.poll())
            return bool(condition(seen[-1]))

        wait_until(holds, SLOW_S, what)
        return seen[-1]

    def close(self) -> None:
        self._source.close()


def eye(server: ServerProcess) -> contextlib.closing[Eye]:
    return contextlib.closing(Eye(server.endpoint))


def is_answered_as_promised(row: str, number: int = 0) -> Callable[[Observed], bool]:
    return lambda observed: answers.of(observed, time.monotonic()) == PROMISED[row][number]


def found(observed: Observed, *path: str) -> Any:
    node: Any = observed.document or {}
    for key in path:
        node = node[int(key)] if isinstance(node, list) else node.get(key, {})
    return node or 0


def test_a_server_that_does_not_answer_or_is_away() -> None:
    with ServerProcess() as server, eye(server) as watch:
        server.sigstop()
        watch.wait(is_answered_as_promised("server-silent"), "the silence")
        server.sigcont()
        watch.wait(lambda observed: observed.document, "the answer")
        with server.client() as client:
            client.call("PING", m.Ping((m.Lost("run.deadline", lookups=5),)))
        watch.wait(is_answered_as_promised("server-silent", 1), "the losses")
        server.kill9()
        away = watch.wait(is_answered_as_promised("server-absent"), "the absence")
        assert "server_gone" in away.error


@pytest.mark.parametrize("row", ["client-refused", "server-refused"])
def test_a_client_that_is_refused_or_refuses(row: str) -> None:
    with ServerProcess() as server, eye(server) as watch:

        def refuse() -> None:
            with server.client(hello=False) as client, pytest.raises(KVFrameworkError):
                client.call("HELLO", m.Hello("new", 7, min_version=98, max_version=99))

        def leave() -> None:
            with server.client(liveness=False) as client:
                client.call("GOODBYE", m.Goodbye("protocol.version", "another chunk size"))

        def refused(observed: Observed) -> bool:
            # It is a problem for some seconds: a client tries again and again.
            (refuse if row == "client-refused" else leave)()
            return is_answered_as_promised(row)(observed)

        watch.wait(refused, "the refusal")


def test_a_tier_that_is_down() -> None:
    with ServerProcess("l2.0.use=redis", f"l2.0.url=redis://127.0.0.1:{free_port()}") as server, eye(server) as watch:
        watch.wait(is_answered_as_promised("tier-down"), "the circuit")


def test_a_log_that_cannot_be_written() -> None:
    with open("/dev/full", "wb") as full, ServerProcess(output=full.fileno()) as server, eye(server) as watch:
        watch.wait(is_answered_as_promised("log-not-written"), "the problem")


def test_descriptors_that_run_low() -> None:
    with ServerProcess() as server, eye(server) as watch:
        in_use = found(watch.healthy, "messaging", "descriptors", "in_use")
        _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (in_use + 4, hard))
        watch.wait(is_answered_as_promised("descriptors-low"), "the shut doors")


# faults that only count: all is ready, and an alert looks at their growth


Fault = Callable[[WireClient], None]


def unknown_namespace(client: WireClient) -> None:
    registered = client.register()
    stranger = key_for(registered, CHUNK, namespace=b"\x01" * 16)
    with contextlib.suppress(KVFrameworkError):
        client.lookup(stranger)


def full_of_reservations(client: WireClient) -> None:
    registered = client.register()
    for number in range(5):
        client.prepare_store(key_for(registered, [number] * 256 * 8))


def slow_reader(client: WireClient) -> None:
    key = key_for(client.register(), CHUNK)
    client.store(key, b"x")
    assert client.prepare_retrieve(key).hit


def stopped_writer(client: WireClient) -> None:
    assert client.prepare_store(key_for(client.register(), CHUNK)).lease


COUNTED: dict[str, tuple[tuple[str, ...], tuple[str, ...], Fault]] = {
    # row: settings, the counter that grows, what a client does
    "namespace-unknown": ((), ("lookups", "unknown_namespace"), unknown_namespace),
    "l1-full-of-pins": ((), ("l1", "counters", "dropped"), full_of_reservations),
    "writer-stopped": (("server.store_lease_s=0.05",), ("l1", "quarantined_bytes"), stopped_writer),
    "reader-slow": (("server.retrieve_lease_s=0.05",), ("l1", "counters", "lapsed"), slow_reader),
}


@pytest.mark.parametrize("row", COUNTED)
def test_a_fault_that_counts(row: str) -> None:
    settings, counter, fault = COUNTED[row]
    with ServerProcess(*settings, capacity="1MiB") as server, eye(server) as watch, server.client() as client:
        fault(client)
        faulty = watch.wait(lambda observed: found(observed, *counter), ".".join(counter))
        assert is_answered_as_promised(row)(faulty)


def test_a_handler_that_raises(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    with faulty_server(tmp_path / "site") as server, eye(server) as watch, server.client() as client:
        with pytest.raises(KVFrameworkError):
            answer(client, send(client, "UNTYPED"))
        faulty = watch.wait(
            lambda observed: found(observed, "messaging", "counters", "errors.run.handler"), "the error"
        )
        assert is_answered_as_promised("handler-raised")(faulty)


@pytest.mark.parametrize("row", ["malformed", "engine-died"])
def test_a_client_that_is_wrong_or_ends(row: str) -> None:
    counter = {"malformed": "malformed", "engine-died": "sessions_ended"}[row]
    with ServerProcess() as server, eye(server) as watch:
        before = found(watch.healthy, "messaging", "counters", counter)
        with server.client() as client:
            client.register()
            client.socket.send_multipart([b"not", b"an", b"envelope"])
        seen = watch.wait(lambda observed: found(observed, "messaging", "counters", counter) > before, counter)
        assert is_answered_as_promised(row)(seen)
