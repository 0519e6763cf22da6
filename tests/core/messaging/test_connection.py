"""The client's end: callbacks, urgency, refusals, and servers that are not what they should be."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from kvframework.api.plugin import Message
from kvframework.errors import HelloRequired, KVFrameworkError, ServerFull, ServerGone, VersionMismatch
from kvframework.messaging.client.connection import Connection
from kvframework.wire.frames import ERROR_TYPE, ErrorPayload, error_payload, join, split
from kvframework.wire.messages import Hello, HelloReply, Pong
from tests.core.messaging.lab import HASHER, TABLE, Lab, Text, ask, connected
from tests.support.processes import descriptors
from tests.support.waiting import wait_until


def test_before_the_server_starts_and_after_it_did(endpoint: str) -> None:
    with connected(endpoint, up=False) as connection:
        assert not connection.wait_up(0.1)
        assert (connection.state, connection.boot_id) == ("down", None)
        assert isinstance(ask(connection, "ECHO").exception(), ServerGone)
        wait_until(lambda: isinstance(connection.last_error, ServerGone))
        lab = Lab(endpoint)
        try:
            assert connection.wait_up(20)
            assert connection.last_error is None
        finally:
            lab.stop()


def test_only_urgent_requests_go_through_while_on_up_runs(lab: Lab) -> None:
    seen: list[object] = []

    def on_up(reply: HelloReply, fd: int | None) -> None:
        seen.append(connection.state)
        seen.append(connection.begin("test.ECHO", Text("early"), timeout=60).exception())
        seen.append(connection.begin("test.ECHO", Text("urgent"), timeout=60, urgent=True).result(20))
        seen.append((reply.hasher_fingerprint, reply.version, fd))

    connection = Connection(lab.endpoint, Hello("t", 1), table=TABLE, on_up=on_up, on_down=lambda: None)
    connection.start()
    try:
        assert connection.wait_up(20)
        state, refused, answer, told = seen
        assert state == "down"
        assert isinstance(refused, ServerGone)
        assert (answer.payload, told) == (Text("urgent"), (HASHER, 1, None))
    finally:
        connection.close()


def test_on_up_that_raises_is_kept_logged_and_tried_again(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    tries: list[int] = []
    downs: list[int] = []

    def on_up(reply: HelloReply, fd: int | None) -> None:
        tries.append(1)
        if len(tries) < 3:
            raise LookupError("cannot register")

    with connected(lab.endpoint, up=False, on_up=on_up, on_down=lambda: downs.append(1)) as connection:
        wait_until(lambda: isinstance(connection.last_error, LookupError))
        assert connection.state == "down"
        assert connection.wait_up(20)
        assert connection.last_error is None
        assert (len(tries), downs) == (3, [])
    assert len(downs) == 1
    assert [r for r in caplog.records if r.levelname == "ERROR" and "connecting to" in r.message]
    wait_until(lambda: len(lab.work.ended) == 3)


def test_a_refusal_is_kept_and_logged_once(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    hello = Hello("t", 1, hasher="another")
    with connected(lab.endpoint, up=False, hello=hello) as connection:
        wait_until(lambda: lab.server.counters["errors.protocol.version"] >= 3)
        assert isinstance(connection.last_error, VersionMismatch)
        assert connection.state == "down"
    assert len([r for r in caplog.records if "cannot be used" in r.message]) == 1


def test_close_fails_what_is_pending_and_may_be_called_from_anywhere(lab: Lab) -> None:
    with connected(lab.endpoint) as connection:
        future = ask(connection, "DEFERRED", "a")
        closed = threading.Event()
        ask(connection, "ECHO").add_done_callback(lambda _: (connection.close(), closed.set()))
        assert closed.wait(60)
        with pytest.raises(ServerGone):
            future.result(20)
        connection.close()
        assert connection.state == "down"
        assert isinstance(ask(connection, "ECHO").exception(), ServerGone)
        assert isinstance(connection.cancel(future).exception(), ServerGone)
    assert not [thread for thread in threading.enumerate() if thread.name in ("kvf-link", "kvf-connection")]


def test_close_from_within_on_up(lab: Lab) -> None:
    downs: list[int] = []
    connection = Connection(
        lab.endpoint, Hello("t", 1), table=TABLE, on_up=lambda *_: connection.close(), on_down=lambda: downs.append(1)
    )
    connection.start()
    wait_until(lambda: downs == [1])
    connection.close()
    assert not connection.wait_up(0)


def test_close_without_start(endpoint: str) -> None:
    connection = Connection(endpoint, Hello("t", 1), table=TABLE, on_up=lambda *_: None, on_down=lambda: None)
    connection.close()


def test_a_raising_callback_harms_nobody(lab: Lab) -> None:
    with connected(lab.endpoint) as connection:
        future = ask(connection, "DEFERRED", "a")
        future.add_done_callback(lambda _: 1 / 0)
        wait_until(lambda: lab.work.open)
        lab.work.resolve("a")
        assert future.result(20).payload.text == "a"
        assert ask(connection, "ECHO", "on").result(20).payload.text == "on"


class StubServer:
    """A ROUTER that answers HELLO without a liveness socket, and PING as it is told to."""

    def __init__(self, endpoint: str) -> None:
        self.hellos = 0
        self.pong: Message | None = Pong(b"one")
        self.running = True
        self._endpoint = endpoint
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(self._endpoint)
            while self.running:
                if not router.poll(10):
                    continue
                identity, *frames = router.recv_multipart()
                envelope = split(frames)
                answer: Message | None = self.pong
                name = envelope.type
                if name == "HELLO":
                    self.hellos += 1
                    answer = HelloReply(1, b"one", b"s" * 16, 256, "h", HASHER, ())
                elif isinstance(answer, ErrorPayload):
                    name = ERROR_TYPE
                if answer is not None:
                    router.send_multipart([identity, *join(envelope.request_id, name, answer)])


@pytest.fixture
def stub(endpoint: str) -> Iterator[StubServer]:
    stub = StubServer(endpoint)
    yield stub
    stub.running = False
    stub.thread.join()


@contextmanager
def counted(endpoint: str) -> Iterator[tuple[Connection, list[int]]]:
    downs: list[int] = []
    options = {"ping_every_s": 0.02, "silent_s": 0.1, "gone_s": 0.1}
    with connected(endpoint, on_down=lambda: downs.append(1), **options) as connection:
        yield connection, downs


def test_without_a_liveness_socket_ping_decides(stub: StubServer, endpoint: str) -> None:
    with counted(endpoint) as (connection, downs):
        stub.pong = None
        future = ask(connection, "DEFERRED", timeout=60)
        wait_until(lambda: downs)
        assert isinstance(future.exception(), ServerGone)
        stub.pong = Pong(b"one")
        assert connection.wait_up(20)
        assert stub.hellos >= 2


def test_hello_required_in_answer_to_ping_means_to_connect_anew(stub: StubServer, endpoint: str) -> None:
    with counted(endpoint) as (connection, downs):
        stub.pong = error_payload(HelloRequired("who are you?"))
        wait_until(lambda: downs)
        stub.pong = Pong(b"one")
        assert connection.wait_up(20)


def test_hello_required_by_a_real_server(lab: Lab) -> None:
    with connected(lab.endpoint, ping_every_s=60) as connection:
        lab.server._table.end(lab.server.sessions[0])
        with pytest.raises(HelloRequired):
            ask(connection, "ECHO").result(20)
        assert connection.wait_up(20)
        assert ask(connection, "ECHO", "on").result(20).payload.text == "on"


def test_a_server_that_accepts_but_never_says_hello(endpoint: str) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(endpoint)
        with connected(endpoint, up=False, hello_s=0.1) as connection:
            wait_until(lambda: "the server did not answer HELLO" in str(connection.last_error))
            identities = {router.recv_multipart()[0] for _ in range(2)}
            assert len(identities) == 2, "each attempt has a socket of its own"


def test_an_oversized_frame_breaks_the_connection_which_heals(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvframework.messaging.frames_io.MAX_BUFFER_BYTES", 1 << 40)
    with connected(lab.endpoint, ping_every_s=0.05, silent_s=0.2) as connection:
        boot = lab.server.sessions[0]
        future = connection.begin("test.BUFFERS", Text(), [memoryview(bytearray((1 << 30) + 1))], timeout=60)
        with pytest.raises(ServerGone):
            future.result(20)
        assert connection.wait_up(20)
        wait_until(lambda: boot in lab.work.ended)
        assert ask(connection, "ECHO", "on").result(20).payload.text == "on"


def test_the_fds_of_a_connection_are_given_back(lab: Lab) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    with connected(lab.endpoint):
        pass
    wait_until(lambda: not lab.server.sessions)
    before = count()
    for _ in range(5):
        with connected(lab.endpoint) as connection:
            assert ask(connection, "ECHO", "on").result(20)
    wait_until(lambda: not lab.server.sessions and count() <= before + 1)


def test_a_lost_server_costs_no_descriptor_even_without_a_garbage_collector(endpoint: str) -> None:
    """Engines freeze or switch off the collector, and the error of a request that failed refers to its connection."""
    errors: list[BaseException] = []

    def wait_for_an_answer() -> None:
        with pytest.raises(KVFrameworkError) as caught:
            connection.ask("test.DEFERRED", Text("held"), timeout=60)
        errors.append(caught.value)

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    lab = Lab(endpoint)
    gc.disable()
    try:
        with connected(endpoint) as connection:
            before = count()
            for _ in range(3):
                caller = threading.Thread(target=wait_for_an_answer)
                caller.start()
                wait_until(lambda work=lab.work: "held" in work.open)  # type: ignore[misc]
                lab.stop()
                caller.join(60)
                lab = Lab(endpoint)
                boot = lab.work.boot_id
                wait_until(lambda boot=boot: (connection.boot_id, connection.state) == (boot, "up"))  # type: ignore[misc]
            wait_until(lambda: count() <= before, what="as few descriptors as before")
            assert len(errors) == 3
    finally:
        gc.enable()
        lab.stop()


def test_a_server_that_ends_before_its_arena_is_mapped_is_gone_and_no_surprise(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[Exception | None] = []
    lab = Lab(endpoint)

    def on_up(_reply: HelloReply, _fd: int | None) -> None:
        lab.stop()
        link = connection._link
        assert link.ended.wait(60)
        try:
            connection.liveness_fd()
        except Exception as error:
            errors.append(error)
            raise

    connection = Connection(endpoint, Hello("t", 1), table=TABLE, on_up=on_up, on_down=lambda: None)
    connection.start()
    try:
        wait_until(lambda: bool(errors))
    finally:
        connection.close()
        lab.stop()
    assert isinstance(errors[0], ServerGone)
    assert not [r for r in caplog.records if r.levelname == "ERROR" and "connecting to" in r.message]


def test_a_connection_without_a_thread_to_get_keeps_no_descriptor(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "kvf-link":
            tries.append(sum("eventfd" in what for what in descriptors(os.getpid()).values()))
            raise RuntimeError("can't start new thread")
        start(thread)

    gc.disable()
    try:
        with monkeypatch.context() as refusing:
            refusing.setattr(threading.Thread, "start", refuse)
            with connected(lab.endpoint, up=False) as connection:
                wait_until(lambda: len(tries) >= 8)
                refusing.undo()
                assert connection.wait_up(20)
        assert tries[7] <= tries[1] + 4, "what differs is what ZMQ has not closed yet"
    finally:
        gc.enable()


def test_a_second_socket_that_does_not_come_in_costs_the_session_nothing(lab: Lab) -> None:
    with connected(lab.endpoint) as connection:
        files = lab.server._files
        files.show(False)  # as the gate does while descriptors run low
        refused = connection.begin("test.ECHO", Text("big"), timeout=60, bulk=True)
        assert isinstance(refused.exception(), ServerFull)
        assert ask(connection, "ECHO", "on").result(20).payload == Text("on")
        assert len(lab.server.sessions) == 1
        files.show(True)
        assert connection.begin("test.ECHO", Text("big"), timeout=60, bulk=True).result(20).payload == Text("big")


@pytest.mark.timeout(120)
def test_a_server_that_hangs_up_is_not_waited_for(tmp_path: Path) -> None:
    """As a process that is being killed."""
    tmp_path.chmod(0o700)
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()

        def hang_up() -> None:
            for _ in range(2):  # the probe, and ZMQ's own
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1)

        ending = threading.Thread(target=hang_up)
        ending.start()
        with connected(f"ipc://{path}", up=False, hello_s=3600.0) as connection:
            wait_until(lambda: "the server did not answer HELLO" in str(connection.last_error))
        ending.join()
