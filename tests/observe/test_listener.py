"""HTTP from strangers: slow, silent, huge and wrong clients take no more than their bounds, and others are served."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import threading
from asyncio.sslproto import SSLProtocol
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from kvf_observe.http import listener as module
from kvf_observe.http.listener import MOST_CONNECTIONS, Listener
from kvf_observe.http.messages import PLAIN, Reply, Request, WantsBody, refused, tls_context
from kvframework.api.endpoint import ObserveConfig
from tests.support.certificates import Certificate, make_certificate
from tests.support.observe_process import Got, get
from tests.support.waiting import wait_until

BIG = b"x" * (8 << 20)


MOST_BODY = 1000


def answer(request: Request) -> Reply | WantsBody:
    if request.target == "/echo":
        return WantsBody(MOST_BODY, lambda body: Reply(200, PLAIN, bytes(body)))
    if request.target == "/refused":
        return refused(HTTPStatus.UNAUTHORIZED)
    if request.target == "/broken":
        raise RuntimeError("a bug")
    return Reply(200, PLAIN, BIG if request.target == "/big" else f"{request.method} {request.target}".encode())


class Running:
    """A listener in a thread of its own, with TLS if there is a certificate."""

    def __init__(self, certificate: Certificate | None = None) -> None:
        config = ObserveConfig()
        if certificate is not None:
            config = ObserveConfig(tls_cert=str(certificate.certificate), tls_key=str(certificate.key))
        self.listener = Listener(answer, tls=tls_context(config))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.place = self._run(self.listener.start("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.place[1]}"

    def _run(self, work):  # type: ignore[no-untyped-def]
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    @property
    def connections(self) -> int:
        return len(self.listener._open)

    def get(self, path: str = "/", **options: str) -> Got:
        return get(self.url, path, **options)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.place, timeout=60)

    def close(self) -> None:
        self._run(self.listener.stop())
        wait_until(lambda: not self.connections, 60, "the end of the connections")
        self._run(asyncio.sleep(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()


@pytest.fixture
def running() -> Iterator[Running]:
    with contextlib.closing(Running()) as made:
        yield made


def exchange(running: Running, data: bytes) -> bytes:
    with running.connect() as sock:
        with contextlib.suppress(OSError):
            sock.sendall(data)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(1 << 16):
                received += piece
        return received


def test_get_head_and_a_second_request_on_one_connection(running: Running) -> None:
    assert running.get("/a") == (200, "GET /a", running.get("/a").headers)
    assert running.get("/a", method="HEAD").text == ""
    with running.connect() as sock:
        for number in range(3):
            sock.sendall(f"GET /{number} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            received = b""
            while not received.endswith(f"GET /{number}".encode()):
                received += sock.recv(4096)
            assert received.startswith(b"HTTP/1.1 200 OK")
            assert b"content-security-policy" in received


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200 + b"\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),  # no Host
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * (1 << 20), b"431"),
        (b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"431"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n" + b"a" * (1 << 18), b"413"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n" + b"a" * 0xFFFF, b"413"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", b"400"),
    ],
)
def test_what_is_no_request_is_refused_and_the_connection_ends(
    running: Running, data: bytes, status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DISCARD_S", 0.2)
    received = exchange(running, data)
    assert received.startswith(b"HTTP/1.1 " + status)
    assert received.count(b"HTTP/1.1 ") == 1
    assert running.get("/after").status == 200


def test_a_bug_is_an_answer(running: Running) -> None:
    assert running.get("/broken").status == 500
    assert running.get("/after").status == 200


def test_clients_that_send_nothing_are_closed(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEAD_S", 0.2)
    with running.connect() as silent, running.connect() as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nA: b")
        assert silent.recv(1) == b""
        assert slow.recv(1) == b""
    wait_until(lambda: not running.connections, 60)


def test_a_client_that_sends_a_byte_now_and_then_is_closed_all_the_same(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEAD_S", 1.0)
    with running.connect() as slow:
        slow.settimeout(0.05)

        def is_closed() -> bool:
            try:
                slow.sendall(b"G")
                return slow.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        wait_until(is_closed, 60, "the end of the slow connection")


def test_a_client_that_does_not_read_is_closed(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.2)
    with running.connect() as deaf:
        deaf.sendall(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_until(lambda: running.connections == 1, 60)
        wait_until(lambda: running.connections == 0, 60, "the end of the connection that is not read")
    assert running.get("/after").status == 200


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_crowd_shuts_no_one_out(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many silent connections as there may be: the oldest end, also those that begin no TLS, and a new one is
    served at once."""
    monkeypatch.setattr(module, "HEAD_S", 600.0)
    certificate = make_certificate(tmp_path) if scheme == "https" else None
    tls = ssl.create_default_context(cafile=certificate.certificate) if certificate else None
    with contextlib.closing(Running(certificate)) as running, contextlib.ExitStack() as crowd:
        silent = [crowd.enter_context(running.connect()) for _ in range(2 * MOST_CONNECTIONS)]
        assert get(f"{scheme}://127.0.0.1:{running.place[1]}", "/a", tls=tls).text == "GET /a"
        wait_until(lambda: sum(map(is_open, silent)) < MOST_CONNECTIONS, 60, "the end of the oldest")
        assert is_open(silent[-1])
        assert running.connections <= MOST_CONNECTIONS


def test_connections_that_end_leave_no_buffers_of_tls(tmp_path: Path) -> None:
    """256 KiB each, until a collection of circles that comes late."""
    certificate = make_certificate(tmp_path)
    tls = ssl.create_default_context(cafile=certificate.certificate)
    gc.collect()
    gc.disable()
    try:
        with contextlib.closing(Running(certificate)) as running:
            for _ in range(20):
                running.connect().close()
                assert get(f"https://127.0.0.1:{running.place[1]}", "/a", tls=tls).status == 200
            wait_until(lambda: not running.connections, 60, "the end of the connections")
            wait_until(lambda: not any(type(each) is SSLProtocol for each in gc.get_objects()), 60, "no buffers")
    finally:
        gc.enable()


def is_open(sock: socket.socket) -> bool:
    try:
        sock.setblocking(False)
        return sock.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_bodies_are_taken_up_to_their_bound_and_connections_go_on(running: Running) -> None:
    with running.connect() as connection:
        for body in (b"x" * 1000, b"", b"y"):
            connection.sendall(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            assert read_answer(connection).endswith(b"\r\n\r\n" + body)
        connection.sendall(
            b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
        )
        assert read_answer(connection).endswith(b"\r\n\r\nabc")
        connection.sendall(b"POST /echo HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 100")
        connection.sendall(b"z")
        assert read_answer(connection).endswith(b"\r\n\r\nz")


@pytest.mark.parametrize(
    "head",
    [b"Content-Length: 1001\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001],
    ids=["announced", "sent"],
)
def test_a_body_beyond_its_bound_is_refused(running: Running, head: bytes) -> None:
    with running.connect() as connection:
        connection.sendall(b"POST /echo HTTP/1.1\r\nHost: a\r\n" + head)
        assert read_answer(connection).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("request_line", "body", "status"),
    [
        (b"POST /refused", b"Content-Length: 9", b"401"),
        (b"POST /refused", b"Transfer-Encoding: chunked", b"401"),
        (b"POST /elsewhere", b"Content-Length: 9", b"413"),
        (b"POST /echo", b"Content-Length: 1001", b"413"),
    ],
)
def test_who_is_refused_by_the_head_is_not_asked_for_the_body(
    running: Running, request_line: bytes, body: bytes, status: bytes
) -> None:
    with running.connect() as connection:
        connection.sendall(request_line + b" HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n" + body + b"\r\n\r\n")
        answer = read_answer(connection)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"\r\nconnection: close\r\n" in answer.lower()


def test_bodies_have_a_bound_together(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BODIES", 1500)
    head = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n"
    with running.connect() as first:
        first.sendall(head + b"x" * 999)
        wait_until(lambda: running.listener._body_bytes == 999)
        for more in (head, b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1f6\r\n" + b"x" * 502):
            with running.connect() as second:
                second.sendall(more)
                answer = read_answer(second)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1\r\n" in answer.lower()
        first.sendall(b"y")
        assert read_answer(first).endswith(b"xy")
        wait_until(lambda: not running.listener._body_bytes)
        first.sendall(head + b"x" * 1000)
        assert read_answer(first).startswith(b"HTTP/1.1 200 ")


def test_bodies_that_are_too_much_together_are_not_all_refused(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that is refused leaves its room to the others at once."""
    monkeypatch.setattr(module, "MOST_BODIES", 1500)
    goes_on = threading.Event()
    with contextlib.ExitStack() as stack:
        senders = [stack.enter_context(running.connect()) for _ in range(3)]
        for sender in senders:
            sender.sendall(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\nx")
        wait_until(lambda: running.listener._body_bytes == 3)
        for sender in senders:
            sender.sendall(b"x" * 479)
        wait_until(lambda: running.listener._body_bytes == 1440)
        running._loop.call_soon_threadsafe(goes_on.wait, 60)
        for sender in senders:
            sender.sendall(b"x" * 520)
        goes_on.set()
        found = sorted(read_answer(sender)[9:12] for sender in senders)
    assert found[0] == b"200"
    assert found[-1] == b"503"
    wait_until(lambda: not running.listener._body_bytes)


def test_requests_that_come_together_are_answered_in_their_order(running: Running) -> None:
    with running.connect() as connection:
        connection.sendall(
            b"HEAD /a HTTP/1.1\r\nHost: a\r\n\r\n"
            b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"
            b"GET /b HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        )
        data = b""
        while piece := connection.recv(1 << 16):
            data += piece
    head, echo, last = data.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert head.endswith(b"\r\n\r\n"), "of HEAD there is no body"
    assert echo.endswith(b"\r\n\r\nabc")
    assert last.endswith(b"\r\n\r\nGET /b")


def test_a_body_that_does_not_come_ends_its_connection(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BODY_S", 0.2)
    with running.connect() as connection:
        connection.sendall(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc")
        assert connection.recv(1000) == b""
    wait_until(lambda: not running.connections)


def read_answer(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(1000)
    head, _, body = data.partition(b"\r\n\r\n")
    (length,) = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    while len(body) < length:
        body += connection.recv(1000)
    return head + b"\r\n\r\n" + body
