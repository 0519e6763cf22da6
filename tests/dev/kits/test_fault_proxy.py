"""The faults of a wire: without one all passes; each kind takes place, is counted, and ends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvf_dev.testing.faults import WIRE_FAULTS, FaultProxy


class Echo:
    """Sends back what it gets, as many times as it is told."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._threads = [threading.Thread(target=self._listen)]
        self._threads[0].start()

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(sock,)))
            self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                while received := sock.recv(1 << 16):
                    sock.sendall(received)
            except OSError:
                return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()


@pytest.fixture(params=["tcp", "unix"])
def proxy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FaultProxy]:
    if request.param == "unix":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "echo"))
        listener.listen()
    else:
        listener = socket.create_server(("127.0.0.1", 0))
    echo = Echo(listener)
    with FaultProxy(listener.getsockname()) as proxy:
        yield proxy
    echo.close()


def connected(proxy: FaultProxy) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX if isinstance(proxy.address, str) else socket.AF_INET)
    sock.settimeout(10.0)
    try:
        sock.connect(proxy.address)
    except BaseException:
        sock.close()
        raise
    return sock


def received(sock: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        piece = sock.recv(size - len(found))
        if not piece:
            break
        found += piece
    return found


def assert_echoes(sock: socket.socket, nbytes: int = 1000) -> None:
    sent = bytes(number % 251 for number in range(nbytes))
    sock.sendall(sent)
    assert received(sock, nbytes) == sent


def test_without_a_fault_all_passes_both_ways(proxy: FaultProxy) -> None:
    with connected(proxy) as one, connected(proxy) as other:
        assert_echoes(one)
        sent = bytes(3 << 20)
        sender = threading.Thread(target=other.sendall, args=(sent,))
        sender.start()
        assert received(other, len(sent)) == sent
        sender.join()
        assert_echoes(one)
        one.shutdown(socket.SHUT_WR)
        assert one.recv(1) == b""
    assert not +proxy.injected


def test_slow_delays_replies(proxy: FaultProxy) -> None:
    with connected(proxy) as sock:
        proxy.inject("slow", 0.05)
        started = time.monotonic()
        assert_echoes(sock)
        assert time.monotonic() - started >= 0.05
        proxy.heal()
        assert_echoes(sock)
    assert proxy.injected["slow"] >= 1


def test_cut_ends_a_connection_after_so_many_bytes(proxy: FaultProxy) -> None:
    with connected(proxy) as sock:
        assert_echoes(sock)
        proxy.inject("cut", 300)
        sock.sendall(bytes(1000))
        try:
            found = received(sock, 1000)
        except ConnectionResetError:
            found = b""
        assert len(found) in (0, 300)
    assert proxy.injected["cut"] == 1
    proxy.heal()
    with connected(proxy) as sock:
        assert_echoes(sock)


def test_flip_changes_a_bit_of_every_so_many_bytes(proxy: FaultProxy) -> None:
    with connected(proxy) as sock:
        proxy.inject("flip", 100)
        for _ in range(3):
            sock.sendall(bytes(350))
            assert received(sock, 350)
        proxy.heal()
        proxy.inject("flip", 100)
        sock.sendall(bytes(250))
        found = received(sock, 250)
        assert [at for at, byte in enumerate(found) if byte] == [99, 199]
        assert all(byte.bit_count() == 1 for byte in found if byte)
        proxy.heal()
        assert_echoes(sock)
    assert proxy.injected["flip"] == 10 + 2


def test_refuse_resets_what_is_open_and_what_comes(proxy: FaultProxy) -> None:
    with connected(proxy) as sock:
        assert_echoes(sock)
        proxy.inject("refuse")
        with pytest.raises(ConnectionError):
            ask(sock)
        with pytest.raises(ConnectionError):
            ask_anew(proxy)
    assert proxy.injected["refuse"] == 2
    proxy.heal()
    with connected(proxy) as sock:
        assert_echoes(sock)


def ask(sock: socket.socket) -> None:
    """Raises `ConnectionError` if the connection has ended, however it did: a Unix socket knows no reset."""
    sock.sendall(b"x")
    if not sock.recv(1):
        raise ConnectionResetError


def ask_anew(proxy: FaultProxy) -> None:
    with connected(proxy) as sock:
        ask(sock)


def test_stall_holds_everything_back_until_it_heals(proxy: FaultProxy) -> None:
    with connected(proxy) as sock:
        assert_echoes(sock)
        proxy.inject("stall")
        sock.sendall(b"held back")
        sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        with connected(proxy) as new:
            new.settimeout(0.05)
            new.sendall(b"held back too")
            with pytest.raises(TimeoutError):
                new.recv(1)
        sock.settimeout(10.0)
        proxy.heal()
        assert received(sock, 9) == b"held back"
    assert proxy.injected["stall"] == 2


def test_reset_ends_a_connection_in_the_middle_of_its_reply(proxy: FaultProxy) -> None:
    with connected(proxy) as sock:
        proxy.inject("reset")
        with pytest.raises(ConnectionError):
            ask(sock)
    assert proxy.injected["reset"] == 1


def test_a_target_that_is_gone_ends_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with FaultProxy(address) as proxy, pytest.raises(ConnectionError):
        ask_anew(proxy)


@pytest.mark.parametrize("started", [True, False])
def test_closing_a_proxy_twice_is_closing_it_once(started: bool) -> None:
    proxy = FaultProxy(("127.0.0.1", 1))
    if started:
        proxy.start()
    proxy.close()
    proxy.close()


def test_there_is_no_other_fault(proxy: FaultProxy) -> None:
    with pytest.raises(ValueError, match="no such fault: 'melt'"):
        proxy.inject("melt")


def test_every_fault_is_described() -> None:
    assert all(len(meaning) > 20 for meaning in WIRE_FAULTS.values())
