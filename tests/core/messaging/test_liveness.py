"""The liveness socket against strangers, and the files of an endpoint. What a client lost comes to its server once,
whatever answers are lost; and what a server believes of it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframework.api.endpoint import parse_endpoint
from kvframework.api.requests import ClientInfo
from kvframework.errors import EndpointError, InvalidPayload, ProtocolError, ServerGone
from kvframework.messaging.client.liveness import LivenessLink, Reports
from kvframework.messaging.polling import WITHOUT_ARENA
from kvframework.messaging.server import sessions as server_side
from kvframework.messaging.server.sessions import ClientSession, LivenessServer
from kvframework.messaging.server.sockets import EndpointFiles
from kvframework.service.usage_counts import MAX_RECENT, RECENT_S, ClientLosses
from kvframework.wire.frames import decode
from kvframework.wire.messages import MAX_LOST, MOST_LOST, Lost, Ping
from tests.core.messaging.lab import Lab, RawClient, Text, Work, ask, connected, make_server
from tests.support.waiting import wait_until


def dialled(lab: Lab) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    sock.connect(parse_endpoint(lab.endpoint).path + ".live")
    return sock


@pytest.mark.parametrize("data", [b"x" * 16, b"x" * 17, b"x" * 100_000])
def test_garbage_is_dropped_at_once(lab: Lab, data: bytes) -> None:
    with dialled(lab) as sock:
        sock.setblocking(False)
        sock.send(data)
        sock.settimeout(server_side.HALF_OPEN_S / 2)
        try:
            assert sock.recv(1) == b""
        except ConnectionResetError:
            assert len(data) > 17
    wait_until(lambda: lab.server.counters["liveness_refused"] == 1)


def test_the_silent_are_dropped_after_a_while(lab: Lab) -> None:
    with dialled(lab) as silent:
        began = time.monotonic()
        assert silent.recv(1) == b""
        assert time.monotonic() - began < server_side.HALF_OPEN_S + 1
    assert lab.server.counters["liveness_refused"] == 1


def test_a_token_comes_in_one_piece_and_nothing_may_follow(lab: Lab) -> None:
    with RawClient(lab.endpoint) as raw, dialled(lab) as sock, dialled(lab) as greedy, dialled(lab) as slow:
        for wrong, token in ((greedy, raw.welcome.session + b"!"), (slow, raw.welcome.session[:15])):
            wrong.sendall(token)
            assert wrong.recv(1) == b""
        sock.sendall(raw.welcome.session)
        assert sock.recv(1) == WITHOUT_ARENA
        wait_until(lambda: lab.server.sessions[0].local)
        sock.sendall(b"nothing may follow")
        wait_until(lambda: len(lab.work.ended) == 1)


def test_a_crowd_of_half_open_connections_keeps_nobody_out(lab: Lab) -> None:
    crowd = [dialled(lab) for _ in range(server_side.MAX_HALF_OPEN)]
    try:
        with connected(lab.endpoint) as connection:
            assert lab.server.sessions[0].local
            assert ask(connection, "ECHO", "on").result(20)
            crowd += [dialled(lab) for _ in range(10)]
            wait_until(lambda: lab.server.counters["liveness_refused"] >= 9)
            assert ask(connection, "ECHO", "on").result(20)
    finally:
        for sock in crowd:
            sock.close()


def test_the_clients_of_a_node_may_come_all_at_once(endpoint: str) -> None:
    """As after a restart, and before the server has time for any: whom the kernel cannot queue it refuses."""
    server = make_server(endpoint, Work(b"boot"))
    server.bind()
    path = parse_endpoint(endpoint).path + ".live"
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        for _ in range(300):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(20)
            sock.connect(path)


def test_a_session_lives_as_long_as_one_of_its_processes(lab: Lab) -> None:
    with RawClient(lab.endpoint) as raw:
        assert raw.welcome is not None
        links = [
            LivenessLink.connect(raw.welcome.liveness, raw.welcome.session, 5)[0]
            for _ in range(server_side.MAX_PROCESSES)
        ]
        with pytest.raises(ServerGone, match="refused"):
            LivenessLink.connect(raw.welcome.liveness, raw.welcome.session, 5)
        *first, last = links
        for link in first:
            link.close()
        assert raw.ask(5, "test.ECHO", Text("x"))[0] == "test.ECHO"
        assert not lab.work.ended
        last.close()
        wait_until(lambda: len(lab.work.ended) == 1)
        assert raw.ask(6, "test.ECHO", Text("x"))[1].code == "protocol.hello_required"


def test_who_is_heard_beside_an_end_is_not_taken_for_who_ended(tmp_path: Path) -> None:
    """Newcomers get the numbers of descriptors that an end gives back, in the round that still names them."""
    sessions = {name * 16: ClientSession(1, 7, "c", 0.0) for name in (b"a", b"b")}
    counters = dict.fromkeys(["liveness_refused"], 0)
    path = str(tmp_path / "live")
    server = LivenessServer(path, arena_for=None, find=sessions.get, counters=counters)
    command = f"import socket; s = socket.socket(1); s.connect({path!r}); s.send(b'a' * 16); input()"
    hole = os.open(os.devnull, os.O_RDONLY)  # so that the process's descriptor comes before its socket's
    with subprocess.Popen([sys.executable, "-S", "-c", command], stdin=subprocess.PIPE) as process:
        wait_until(lambda: not server.serve() and server._half_open)
        os.close(hole)
        wait_until(lambda: not server.serve() and sessions[b"a" * 16].local)
        ended, watched = server._live
        with socket.socket(socket.AF_UNIX) as newcomer:
            newcomer.connect(path)
            wait_until(lambda: not server.serve() and server._half_open)
            process.kill()
            process.wait()
            newcomer.send(b"b" * 16)
            (heard,) = server._half_open
            epoll = server._epoll
            server._epoll = mock.Mock(wraps=epoll)
            server._epoll.poll = lambda *_: [(fd, select.EPOLLIN) for fd in (ended, heard, watched)]
            assert server.serve() == [sessions[b"a" * 16]]
            server._epoll = epoll
            assert sessions[b"b" * 16].local
            assert server.serve() == []
    server.close()


def test_a_session_without_a_liveness_socket_ends_when_it_is_silent(endpoint: str) -> None:
    lab = Lab(endpoint, session_timeout_s=0.2)
    try:
        with connected(endpoint) as connection, RawClient(endpoint) as raw:
            local, silent = lab.server.sessions
            wait_until(lambda: lab.work.ended == [silent])
            assert raw.ask(5, "test.ECHO", Text("x"))[1].code == "protocol.hello_required"
            assert (lab.server.sessions, connection.state) == ([local], "up")
    finally:
        lab.stop()


def test_another_user_is_refused(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_side, "peer_of", lambda _: (1, os.geteuid() + 1))
    with dialled(lab) as sock:
        assert sock.recv(1) == b""


@pytest.mark.parametrize(
    ("answer", "error"), [(None, ServerGone), (b"", ServerGone), (b"\x01", ProtocolError), (b"?", ProtocolError)]
)
def test_what_the_client_half_refuses(tmp_path: Path, answer: bytes | None, error: type[Exception]) -> None:
    path = str(tmp_path / "s")
    with pytest.raises(ServerGone):
        LivenessLink.connect(path, b"t" * 16, 0.1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(16)
                if answer is None:
                    sock.recv(1)  # says nothing, until the client gives up
                else:
                    sock.send(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(error):
            LivenessLink.connect(path, b"t" * 16, 0.5)
        thread.join(60)
        assert not thread.is_alive()


def test_sockets_are_for_their_owner_only_and_removed_at_the_end(lab: Lab) -> None:
    path = parse_endpoint(lab.endpoint).path
    for name in (path, path + ".live", path + ".lock"):
        assert stat.S_IMODE(os.stat(name).st_mode) == 0o600
    lab.stop()
    assert os.listdir(os.path.dirname(path)) == []


def test_stale_sockets_are_removed_but_no_other_file(endpoint: str) -> None:
    path = parse_endpoint(endpoint).path
    for name in (path, path + ".live"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(name)
    Lab(endpoint).stop()
    Path(path).write_text("somebody's")
    with pytest.raises(EndpointError, match="not a socket"):
        EndpointFiles(endpoint).acquire()
    assert Path(path).read_text() == "somebody's"
    assert not os.path.exists(path + ".lock")


def test_a_server_that_never_serves_leaves_nothing(endpoint: str) -> None:
    server = make_server(endpoint, Work(b"boot"))
    server.bind()
    server.close()
    server.close()
    assert os.listdir(os.path.dirname(parse_endpoint(endpoint).path)) == []
    server = make_server(endpoint, Work(b"boot"))
    server.bind()
    server.stop()
    server.serve_forever()
    assert os.listdir(os.path.dirname(parse_endpoint(endpoint).path)) == []


@pytest.mark.parametrize(
    "endpoint", ["ipc://relative", "ipc://@abstract", "ipc://*", "ipc:///" + "x" * 120, "ipc:///d/"]
)
def test_endpoints_that_no_local_server_can_have(endpoint: str) -> None:
    with pytest.raises(EndpointError):
        EndpointFiles(endpoint)


@dataclass
class Session(ClientInfo):
    session_id: int = 1
    pid: int = 7
    name: str = "engine"
    local: bool = True


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(["lookups", "loads", "stores"]), st.integers(0, 30)),
        st.tuples(st.sampled_from(["heard and told", "heard", "new session"])),
    ),
    max_size=60,
)


@given(STEPS)
@settings(deadline=None)
def test_what_was_lost_is_counted_once(steps: list[tuple[object, ...]]) -> None:
    """PINGs that were heard and whose answers were not are told again, in the same session; before a new one all that
    was heard was answered."""
    reports, server = Reports(), ClientLosses()
    session, expected, calls = Session(), dict.fromkeys(("lookups", "loads", "stores"), 0), 0
    reports.begin()

    def heard() -> Ping:
        ping = reports.ping()
        server.heard(session, ping.lost)
        return ping

    for step in steps:
        match step:
            case ("add", str(kind), int(code)):
                reports.lost(kind, f"code.{code}", 10)  # type: ignore[arg-type]
                expected[kind] += 1
                calls += 1
            case ("heard and told",):
                reports.answered(heard())
            case ("heard",):
                heard()
            case ("new session",):
                reports.answered(heard())
                server.end_session(session.session_id)
                session = Session(session.session_id + 1)
                reports.begin()
        assert len(reports.ping().lost) <= MAX_LOST
    reports.answered(heard())
    assert reports.ping() == Ping()
    status = server.status()
    assert {kind: status[kind] for kind in expected} == expected
    assert status["bytes"] == 10 * calls


def test_what_came_while_an_answer_was_on_its_way_is_told_next() -> None:
    reports = Reports()
    reports.begin()
    reports.lost("stores", "run.deadline", 5)
    first = reports.ping()
    reports.lost("stores", "run.deadline", 5)
    reports.answered(first)
    assert reports.ping().lost == (Lost("run.deadline", stores=2, nbytes=10),)
    reports.begin()
    assert reports.ping().lost == (Lost("run.deadline", stores=1, nbytes=5),)


@pytest.mark.parametrize(
    "wrong", [{"stores": -1}, {"stores": MOST_LOST + 1}, {"nbytes": (1 << 64) - 1}, {"code": "x" * 65}]
)
def test_amounts_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    payload = msgspec.msgpack.encode({"lost": [{"code": "c", **wrong}]})
    with pytest.raises(InvalidPayload):
        decode(payload, Ping, where="PING")
    with pytest.raises(InvalidPayload):
        decode(msgspec.msgpack.encode({"lost": [{"code": "c"}] * (MAX_LOST + 1)}), Ping, where="PING")


def test_a_client_counts_for_itself_only_and_never_backwards() -> None:
    server = ClientLosses()
    server.heard(Session(1, name="one"), [Lost("c", stores=5)])
    server.heard(Session(2, name="two"), [Lost("c", stores=3)])
    server.heard(Session(1, name="one"), [Lost("c", stores=1)])
    assert server.status()["stores"] == 8
    assert [(each["client"], each["stores"]) for each in server.status()["recent"]] == [("two", 3), ("one", 5)]
    server.heard(Session(1, name="one"), [Lost("c", stores=6)])
    assert server.status()["stores"] == 9


def test_nothing_that_clients_say_grows_without_end() -> None:
    server = ClientLosses()
    for number in range(1, 4 * MAX_RECENT):
        for _ in range(3):
            server.heard(Session(number), [Lost("c", stores=MOST_LOST, nbytes=MOST_LOST)])
    status = server.status()
    assert (status["stores"], status["bytes"]) == (MOST_LOST, MOST_LOST)
    assert len(status["recent"]) == MAX_RECENT
    for number in range(500):
        server.heard(Session(1), [Lost(f"code.{number}.{each}", loads=1) for each in range(MAX_LOST)])
    assert server.status()["loads"] <= 2 * MAX_LOST
    msgspec.json.encode(server.status())


def test_what_is_recent_passes_and_the_sums_stay() -> None:
    now = [100.0]
    server = ClientLosses(lambda: now[0])
    server.heard(Session(), [Lost("run.deadline", stores=2, nbytes=8)])
    server.end_session(1)
    now[0] += RECENT_S
    (recent,) = server.status()["recent"]
    assert (recent["codes"], recent["ago_s"], recent["pid"]) == ({"run.deadline": 2}, RECENT_S, 7)
    now[0] += 1
    assert server.status()["recent"] == []
    assert server.status()["stores"] == 2
