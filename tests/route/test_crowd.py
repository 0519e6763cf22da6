"""Crowds that ask a router, over real sockets: strangers with large bodies, callers with large prompts. Each costs a
bounded memory, which goes back, and `/livez` is answered meanwhile."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvf_route.app import MOST_BODY, MOST_TOKENS
from tests.route.route_process import SLOW_S, RouteProcess
from tests.support.waiting import wait_until

NOWHERE = ("--node", "a=tcp://127.0.0.1:1")
CROWD = 24
SCORES = 12
TOKEN = "a token of the routers"
MIB = 1 << 20
PIECE = bytes(64 << 10)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    return file


def memory(router: RouteProcess, field: str = "VmRSS") -> int:
    lines = Path(f"/proc/{router.process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) << 10


def forget_peak(router: RouteProcess) -> int:
    Path(f"/proc/{router.process.pid}/clear_refs").write_text("5")
    return memory(router)


def head(length: int, *headers: str) -> bytes:
    lines = ("POST /score HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {length}", *headers)
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def send(connection: socket.socket, length: int) -> None:
    with contextlib.suppress(ConnectionError):
        for _ in range(length // len(PIECE)):
            connection.sendall(PIECE)


def answered(connection: socket.socket) -> bytes:
    """What has come of an answer, b"" for none: the sender of what the server did not read may see none."""
    connection.setblocking(False)
    try:
        return connection.recv(4096)
    except OSError:
        return b""


def test_a_crowd_of_strangers_sends_no_body(token_file: Path) -> None:
    with RouteProcess(*NOWHERE, "--token-file", str(token_file)) as router, contextlib.ExitStack() as crowd:
        before = forget_peak(router)
        strangers = [crowd.enter_context(router.connect()) for _ in range(CROWD)]
        for stranger in strangers:
            stranger.sendall(head(MOST_BODY))
        assert [stranger.recv(13) for stranger in strangers] == [b"HTTP/1.1 401 "] * CROWD, "before their bodies"
        with ThreadPoolExecutor(CROWD) as threads:
            list(threads.map(lambda stranger: send(stranger, MOST_BODY), strangers))
        assert memory(router, "VmHWM") - before < 32 * MIB


@pytest.mark.parametrize("chunked", [False, True], ids=["announced", "chunked"])
def test_bodies_of_a_crowd_have_a_bound_together_and_their_memory_goes_back(chunked: bool) -> None:
    with RouteProcess(*NOWHERE) as router, contextlib.ExitStack() as crowd:
        before = forget_peak(router)

        def begin(_: int) -> socket.socket:
            connection = router.connect()
            if chunked:
                connection.sendall(b"POST /score HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n")
                connection.sendall(b"%x\r\n" % MOST_BODY)
            else:
                connection.sendall(head(MOST_BODY))
            send(connection, MOST_BODY - len(PIECE))
            return connection

        with ThreadPoolExecutor(CROWD) as threads:
            connections = [crowd.enter_context(each) for each in threads.map(begin, range(CROWD))]
        refusals: list[bytes] = []
        wait_until(lambda: refusals.extend(filter(None, map(answered, connections))) or refusals, SLOW_S, "a refusal")
        for each in refusals:
            assert each.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1\r\n" in each.lower()
        assert memory(router, "VmHWM") - before < 128 * MIB
        crowd.close()
        wait_until(lambda: memory(router) - before < 24 * MIB, SLOW_S, "the memory")
        router.score(list(range(100)))


def test_a_crowd_of_long_prompts_delays_no_probe() -> None:
    """Measured against the scores, since this machine may be busy: without turns, a probe waits for whole prompts."""
    tokens = [100_000 + number % 20_000 for number in range(MOST_TOKENS)]
    body = json.dumps({"tokens": tokens}, separators=(",", ":")).encode()
    with RouteProcess(*NOWHERE) as router:
        before = forget_peak(router)
        took: list[float] = []
        probes: list[float] = []
        over = threading.Event()

        def ask(_: int) -> int:
            status = 503
            while status == 503:
                began = time.monotonic()
                status = router.ask("POST", "/score", body)[0]
                if status == 200:
                    took.append(time.monotonic() - began)
                else:
                    time.sleep(1.0)  # as the answer says
            return status

        def probe() -> None:
            while not over.is_set():
                began = time.monotonic()
                assert router.ask("GET", "/livez") == (200, b"ok\n")
                probes.append(time.monotonic() - began)

        prober = threading.Thread(target=probe)
        prober.start()
        with ThreadPoolExecutor(SCORES) as threads:
            assert list(threads.map(ask, range(SCORES))) == [200] * SCORES
        over.set()
        prober.join(SLOW_S)
        ninth = statistics.quantiles(probes, n=10)[-1]
        assert ninth < statistics.median(took) / 4
        assert memory(router, "VmHWM") - before < 128 * MIB
        wait_until(lambda: memory(router) - before < 24 * MIB, SLOW_S, "the memory")
