"""Life and death across real processes: kill -9, fork, SIGSTOP, restart. What a process may still take of the
kernel."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from kvframework.errors import OutOfResources, ServerGone
from kvframework.messaging import polling as counts
from kvframework.messaging.client import connection
from kvframework.messaging.server import sessions
from kvframework.wire.messages import HelloReply
from tests.core.messaging.lab import Lab, ask, connected
from tests.support.processes import descriptors
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(endpoint: str) -> Iterator[Start]:
    """Starts a program of this directory at the endpoint; whatever is left is killed."""
    processes: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", f"tests.core.messaging.{program}", endpoint, *arguments]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
        processes.append(process)
        return process

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its forks, too
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    """Its line, which also says that it is ready."""
    line = process.stdout.readline()
    assert line, f"the process ended with {process.wait()}"
    return line


def test_a_killed_client_ends_at_once(lab: Lab, start: Start) -> None:
    client = start("client_program", "defer")
    said(client)
    session = lab.server.sessions[0]
    assert (session.local, session.pid) == (True, client.pid)
    client.kill()
    wait_until(lambda: lab.work.ended == [session])
    assert not session.local
    assert lab.work.cancelled == ["left behind"]
    lab.work.resolve("left behind")
    wait_until(lambda: lab.server.counters["late"] == 1)
    assert lab.server.counters["sessions_ended"] == 1


def test_a_clean_end_ends_the_session_once(lab: Lab) -> None:
    with connected(lab.endpoint):
        session = lab.server.sessions[0]
    wait_until(lambda: lab.work.ended == [session])
    assert not lab.server.sessions


def test_a_fork_of_a_dead_client_keeps_nothing_alive(lab: Lab, start: Start) -> None:
    client = start("client_program", "fork")
    child = int(said(client).split()[0])
    try:
        assert lab.server.sessions[0].local
        client.kill()
        wait_until(lambda: len(lab.work.ended) == 1)
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("option", [sessions._SO_PEERPIDFD, 9999], ids=["by its socket", "by its id"])
def test_a_child_forked_from_c_keeps_no_dead_engines_session(
    lab: Lab, start: Start, monkeypatch: pytest.MonkeyPatch, option: int
) -> None:
    monkeypatch.setattr(sessions, "_SO_PEERPIDFD", option)
    before = len(descriptors(os.getpid()))
    client = start("client_program", "fork from C")
    child = int(said(client).split()[0])
    try:
        (session,) = lab.server.sessions
        assert session.local
        client.kill()
        client.wait()
        wait_until(lambda: lab.work.ended == [session])
        os.kill(child, 0)
        assert not session.local
    finally:
        os.kill(child, signal.SIGKILL)
    wait_until(lambda: len(descriptors(os.getpid())) <= before + 2, what="the end of its descriptors")  # said's pipe


def test_where_no_process_is_seen_the_end_of_the_socket_counts(
    lab: Lab, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "peer_process", lambda _: None)
    client = start("client_program", "defer")
    said(client)
    assert len(lab.server.sessions) == 1
    client.kill()
    wait_until(lambda: len(lab.work.ended) == 1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_does_not_end_its_parents_session(lab: Lab) -> None:
    with connected(lab.endpoint) as connection:
        for leave in (os._exit, lambda _: os.kill(os.getpid(), signal.SIGKILL)):
            child = os.fork()
            if child == 0:
                connection.close()
                leave(0)
            os.waitpid(child, 0)
        assert ask(connection, "ECHO", "on").result(20).payload.text == "on"
        assert not lab.work.ended


class Watcher:
    """What a connection's callbacks told, in order."""

    def __init__(self) -> None:
        self.told: list[bytes | None] = []

    def up(self, reply: HelloReply, fd: int | None) -> None:
        self.told.append(reply.boot_id)

    def down(self) -> None:
        self.told.append(None)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_dies_and_comes_back(endpoint: str, start: Start, how: signal.Signals) -> None:
    server = start("server_program")
    said(server)
    watcher = Watcher()
    with connected(endpoint, on_up=watcher.up, on_down=watcher.down) as connection:
        futures = [ask(connection, "DEFERRED", str(n), timeout=60) for n in range(10)]
        server.send_signal(how)
        server.wait(60)
        wait_until(lambda: connection.state == "down" and len(watcher.told) == 2)
        assert all(future.query() and future.exception() for future in futures)
        assert isinstance(ask(connection, "ECHO").exception(), ServerGone)
        said(start("server_program"))
        assert connection.wait_up(20)
        first, gone, second = watcher.told
        assert gone is None
        assert connection.boot_id == second != first
        assert ask(connection, "ECHO", "on").result(20).payload.text == "on"
    assert watcher.told[3:] == [None]


def test_open_descriptors_are_counted_with_and_without_the_kernels_help(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = counts.descriptors_in_use()
    monkeypatch.setattr(os, "stat", lambda _: os.stat_result((0,) * 10))  # as before Linux 6.2
    assert counts.descriptors_in_use() == counted
    with contextlib.ExitStack() as stack:
        for _ in range(7):
            stack.callback(os.close, os.dup(0))
        assert counts.descriptors_in_use() == counted + 7


def test_none_left_even_to_count_them_is_none_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: str) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "stat", none_left)
    assert counts.descriptors_in_use() == counts.descriptor_limit()
    with pytest.raises(OutOfResources, match="fewer than 1 of"):
        counts.need(descriptors=1)


def test_what_is_needed_is_there_or_it_is_said() -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    counts.need(descriptors=1, threads=2)
    with pytest.raises(OutOfResources, match=f"of its {limit} open files left"):
        counts.need(descriptors=limit)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (OSError(errno.EMFILE, "Too many open files"), True),
        (zmq.ZMQError(errno.EMFILE), True),
        (RuntimeError("can't start new thread"), True),
        (MemoryError(), True),
        (OSError(errno.ENOENT, "No such file"), False),
        (RuntimeError("another"), False),
    ],
)
def test_errors_that_say_that_something_has_run_out(error: Exception, is_one: bool) -> None:
    assert (counts.as_out_of_resources(error) is not None) == is_one


def test_a_connection_takes_far_less_than_is_asked_for(lab: Lab) -> None:
    command = [sys.executable, "-m", "tests.core.messaging.client_program", lab.endpoint, "stay"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "done\n"
            taken = [what for what in descriptors(process.pid).values() if what.startswith(("socket:", "anon_inode:"))]
        finally:
            process.kill()
    assert 8 <= len(taken) <= connection._FOR_A_CONTEXT["descriptors"] // 2
