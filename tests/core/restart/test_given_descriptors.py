"""A real server and the descriptors that it is given: those that another server uses, and variables that lie."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.core.restart.prompts import CAPACITY, hits, store
from tests.support.held_server import HeldServer
from tests.support.processes import descriptors
from tests.support.server_process import fixture_of
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient

pytestmark = pytest.mark.timeout(300)

KNOWN = range(8)
# Becomes `kvframework serve` with the descriptors argv[1] from number 3 on, and the other arguments.
_PROGRAM = """
import fcntl, os, sys
given = [int(fd) for fd in filter(None, sys.argv[1].split(","))]
moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in given]
for place, fd in enumerate(moved, 3):
    os.dup2(fd, place, inheritable=True)
os.environb[b"LISTEN_PID"] = os.environb.get(b"LISTEN_PID", b"%d" % os.getpid())
os.execv(sys.executable, [sys.executable, "-m", "kvframework.cli.main", "serve", *sys.argv[2:]])
"""


server = fixture_of(HeldServer, capacity=CAPACITY)


class Given:
    """A server with the given descriptors, on an endpoint of its own below `folder`; `notes` is where it speaks to its
    keeper."""

    def __init__(self, folder: Path, given: Sequence[int], variables: dict[bytes, bytes]) -> None:
        self.endpoint = f"ipc://{folder}/2.sock"
        self.log = folder / "2.log"
        self.notes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notes.setblocking(False)
        self.notes.bind(f"{folder}/2.note")
        settings = ("--set", f"server.endpoint={self.endpoint}", "--set", f"l1.capacity={CAPACITY}")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, ",".join(map(str, given)), *settings],
                env={**os.environb, b"NOTIFY_SOCKET": f"{folder}/2.note".encode(), **variables},
                pass_fds=given,
                stdout=log,
                stderr=log,
            )

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self.notes.close()

    def serving(self) -> None:
        def answers() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(OSError, TimeoutError), WireClient(self.endpoint, timeout=2.0) as client:
                return bool(client.status())
            return False

        wait_until(answers, 60, "the server")


def test_a_kept_arena_has_one_server(server: HeldServer) -> None:
    assert server.process is not None
    folder = Path(server.base).parent
    keeper = server.process.pid
    held = {fd: target for fd, target in descriptors(keeper).items() if "memfd:kvframework-" in target}
    given = [os.open(f"/proc/{keeper}/fd/{fd}", os.O_RDWR) for fd in sorted(held, key=held.__getitem__, reverse=True)]
    with server.client() as client:
        store(client, 1, KNOWN)
        variables = {b"LISTEN_FDS": b"2", b"LISTEN_FDNAMES": b"kvf-arena:kvf-journal"}
        with contextlib.closing(Given(folder, given, variables)) as second:
            assert second.process.wait(120) == 2
            said = " ".join(second.log.read_text().split())
            assert "another server still uses the kept arena after" in said
            # Nor did it ask the keeper to let go of anything.
            with pytest.raises(BlockingIOError):
                second.notes.recv(4096)
        assert hits(client, 2, KNOWN) == len(KNOWN)
    for fd in given:
        os.close(fd)
    server.has_served()
    server.kill9()
    server.start()
    assert server.recovered()["why_cold"] == ""
    with server.client() as client:
        assert hits(client, 1, KNOWN) == len(KNOWN)


LIES = {
    "a negative number": (b"-1", b"kvf-arena", b"nothing_kept"),
    "a billion": (b"1000000000", b"kvf-arena", b"nothing_kept"),
    "more than there are": (b"9999", b"kvf-arena:kvf-journal", b"nothing_kept"),
    "fewer names": (b"2", b"kvf-arena", b"nothing_kept"),
    "bytes that are no text": (b"2", b"kvf-\xff\xfe:\x01", b"nothing_kept"),
    "one name twice": (b"2", b"kvf-arena:kvf-arena", b"nothing_kept"),
    "strangers": (b"2", b"kvf-arena:kvf-journal", b"damaged"),
}


@pytest.mark.parametrize("lie", LIES)
def test_variables_that_lie(lie: str) -> None:
    number, names, why = LIES[lie]
    with tempfile.TemporaryDirectory(prefix="kvf-") as made:
        given = [os.open(made, os.O_RDONLY), os.memfd_create("stranger")]
        variables = {b"LISTEN_FDS": number, b"LISTEN_FDNAMES": names}
        with contextlib.closing(Given(Path(made), given, variables)) as server:
            server.serving()
            with WireClient(server.endpoint) as client:
                assert client.status()["l1"]["recovered"]["why_cold"].startswith(why.decode())
                store(client, 1, KNOWN)
                assert hits(client, 2, KNOWN) == len(KNOWN)
            assert "Traceback" not in server.log.read_text()
        for fd in given:
            os.close(fd)
