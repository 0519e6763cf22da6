"""Faults at real servers: /livez and /readyz answer what the row in docs/operations.md promises, and the alert of that
row fires, by Prometheus's own evaluation."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvf_observe.poller import Observed, Poller
from kvframework.client.status_source import StatusSource
from kvframework.errors import KVFrameworkError
from kvframework.wire import messages as m
from tests.core.survival.faulty_server import answer, faulty_server, send
from tests.observe import answers
from tests.observe.documents import answered
from tests.observe.promtool import NEEDED, Timeline, complaints
from tests.support.ports import free_port
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

PROMISED = answers.promised()
BEGIN, END = 20, 50
SLOW_S = 60.0
CHUNK = list(range(256))


class Eye:
    """Polls one server, as `observe` does."""

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


@contextlib.contextmanager
def eye(server: ServerProcess) -> Iterator[Eye]:
    made = Eye(server.endpoint)
    try:
        yield made
    finally:
        made.close()


def is_answered_as_promised(row: str, number: int = 0) -> Callable[[Observed], bool]:
    return lambda observed: answers.of(observed, time.monotonic()) == PROMISED[row][number]


def found(observed: Observed, *path: str) -> Any:
    node: Any = observed.document or {}
    for key in path:
        node = node[int(key)] if isinstance(node, list) else node.get(key, {})
    return node or 0


def check_alert(healthy: Observed, faulty: Observed, alert: str, folder: Path) -> None:
    """The fault stays: does the alert fire, and no other?"""
    timeline = Timeline(alert, lambda minute: faulty if minute >= BEGIN else healthy, END, {alert})
    assert complaints([timeline], folder) == ""


@NEEDED
def test_a_server_that_does_not_answer_or_is_away(tmp_path: Path) -> None:
    with ServerProcess() as server, eye(server) as watch:
        server.sigstop()
        silent = watch.wait(is_answered_as_promised("server-silent"), "the silence")
        check_alert(watch.healthy, silent, "KvframeworkDown", tmp_path)
        server.sigcont()
        watch.wait(lambda observed: observed.document, "the answer")
        with server.client() as client:
            client.call("PING", m.Ping((m.Lost("run.deadline", lookups=5),)))
        lost = watch.wait(is_answered_as_promised("server-silent", 1), "the losses")
        check_alert(watch.healthy, lost, "KvframeworkClientsLose", tmp_path)
        server.kill9()
        away = watch.wait(is_answered_as_promised("server-absent"), "the absence")
        assert "server_gone" in away.error
        check_alert(watch.healthy, away, "KvframeworkDown", tmp_path)


@NEEDED
@pytest.mark.parametrize("row", ["client-refused", "server-refused"])
def test_a_client_that_is_refused_or_refuses(row: str, tmp_path: Path) -> None:
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

        faulty = watch.wait(refused, "the refusal")
        check_alert(watch.healthy, faulty, "KvframeworkClientRefused", tmp_path)


@NEEDED
def test_a_tier_that_is_down(tmp_path: Path) -> None:
    with ServerProcess("l2.0.use=redis", f"l2.0.url=redis://127.0.0.1:{free_port()}") as server, eye(server) as watch:
        faulty = watch.wait(is_answered_as_promised("tier-down"), "the circuit")
        check_alert(answered(), faulty, "KvframeworkTierDown", tmp_path)


@NEEDED
def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full, ServerProcess(output=full.fileno()) as server, eye(server) as watch:
        faulty = watch.wait(is_answered_as_promised("log-not-written"), "the problem")
        check_alert(answered(), faulty, "KvframeworkLogNotWritten", tmp_path)


@NEEDED
def test_descriptors_that_run_low(tmp_path: Path) -> None:
    with ServerProcess() as server, eye(server) as watch:
        in_use = found(watch.healthy, "messaging", "descriptors", "in_use")
        _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (in_use + 4, hard))
        faulty = watch.wait(is_answered_as_promised("descriptors-low"), "the shut doors")
        check_alert(watch.healthy, faulty, "KvframeworkDescriptorsLow", tmp_path)


# faults that only count: all is ready, and an alert looks at their growth


def growing(first: Observed, last: Observed) -> Callable[[int], Observed]:
    """Every counter grows each minute by what it grew by from one poll to the other."""

    def grown(before: Any, after: Any, times: int) -> Any:
        if isinstance(after, dict):
            return {
                key: grown(before.get(key, 0) if isinstance(before, dict) else 0, value, times)
                for key, value in after.items()
            }
        if isinstance(after, int) and not isinstance(after, bool):
            start = before if isinstance(before, int) else 0
            return start + (after - start) * times
        return after

    assert first.document is not None
    assert last.document is not None
    parts = ("l1", "lookups", "messaging")

    def at(minute: int) -> Observed:
        times = max(minute - BEGIN, 0)
        counters = {part: grown(first.document[part], last.document[part], times) for part in parts}  # type: ignore[index]
        return last._replace(document={**(last.document or {}), **counters})

    return at


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


COUNTED: dict[str, tuple[tuple[str, ...], tuple[str, ...], Fault, str | None]] = {
    # row: settings, the counter that grows, what a client does, the alert
    "namespace-unknown": ((), ("lookups", "unknown_namespace"), unknown_namespace, "KvframeworkUnknownNamespace"),
    "l1-full-of-pins": ((), ("l1", "counters", "dropped"), full_of_reservations, "KvframeworkStoresDropped"),
    "reader-slow": (
        ("server.retrieve_lease_s=0.05",),
        ("l1", "counters", "lapsed"),
        slow_reader,
        "KvframeworkPinsLapse",
    ),
}


@NEEDED
@pytest.mark.parametrize("row", COUNTED)
def test_a_fault_that_counts(row: str, tmp_path: Path) -> None:
    settings, counter, fault, alert = COUNTED[row]
    with ServerProcess(*settings, capacity="1MiB") as server, eye(server) as watch, server.client() as client:
        fault(client)
        faulty = watch.wait(lambda observed: found(observed, *counter), ".".join(counter))
        assert is_answered_as_promised(row)(faulty)
        timeline = Timeline(row, growing(watch.healthy, faulty), END, {alert})
        assert complaints([timeline], tmp_path) == ""


@NEEDED
def test_a_writer_that_is_stopped(tmp_path: Path) -> None:
    with ServerProcess("server.store_lease_s=0.05") as server, eye(server) as watch, server.client() as client:
        assert client.prepare_store(key_for(client.register(), CHUNK)).lease
        faulty = watch.wait(lambda observed: found(observed, "l1", "quarantined_bytes"), "the quarantine")
        assert is_answered_as_promised("writer-stopped")(faulty)
        check_alert(watch.healthy, faulty, "KvframeworkQuarantine", tmp_path)


@NEEDED
def test_a_handler_that_raises(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    with faulty_server(tmp_path / "site") as server, eye(server) as watch, server.client() as client:
        with pytest.raises(KVFrameworkError):
            answer(client, send(client, "UNTYPED"))
        faulty = watch.wait(
            lambda observed: found(observed, "messaging", "counters", "errors.run.handler"), "the error"
        )
        assert is_answered_as_promised("handler-raised")(faulty)
        timeline = Timeline(
            "handler", lambda minute: faulty if minute > END - 5 else watch.healthy, END, {"KvframeworkHandlerFails"}
        )
        assert complaints([timeline], tmp_path) == ""


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


@NEEDED
def test_a_server_that_works_fires_nothing(tmp_path: Path) -> None:
    with ServerProcess(capacity="2MiB") as server, eye(server) as watch, server.client() as client:
        registered = client.register()
        for number in range(80):
            key = key_for(registered, [number // 2] * 512)
            reply = client.lookup(key)
            if reply.hit_tokens:
                client.retrieve(key)
                client.call("FREE_LOOKUP_LOCKS", m.TicketRef(reply.ticket))
            else:
                client.store(key, b"x")
        last = watch.poll()
        assert found(last, "l1", "evictions")
        assert found(last, "lookups", "hit_tokens")
        assert complaints([Timeline("working", growing(watch.healthy, last), END, ())], tmp_path) == ""
