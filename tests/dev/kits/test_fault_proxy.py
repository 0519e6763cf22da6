"""The faults of a wire: without one all passes; each kind takes place, is counted, and ends."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from kvf_dev.testing.faults import FaultProxy


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while received := self.request.recv(1 << 16):
                self.request.sendall(received)


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        with FaultProxy(("127.0.0.1", server.server_address[1])) as proxy:
            yield proxy
        server.shutdown()
        serving.join()


def connected(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection(proxy.address, timeout=10.0)


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
    """Raises `ConnectionError` if the connection has ended, however it did."""
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
