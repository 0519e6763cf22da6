"""What reaches the sockets of `kvframework hold` from others than its server. `kvframework hold` as the first process
of a container, and what it imports."""

from __future__ import annotations

import array
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvframework.keeper.sd_notify import remove_note, store_note
from tests.core.keeper.held import TIMEOUT, Held
from tests.support.processes import children, descriptors, ran
from tests.support.waiting import wait_until

STORE = store_note("kvf-arena")
# Noise of every kind; each datagram with so many descriptors.
HOSTILE = [
    (b"", 0),
    (b"\0" * 4000, 0),
    (b"READY=1", 0),
    (STORE, 1),
    (STORE, 2),
    (STORE, 253),
    (STORE + b"\nX=" + b"y" * 60_000, 1),
    (b"FDSTORE=1\nFDNAME=a\nFDSTOREREMOVE=1", 1),
    (remove_note("kvf-arena"), 0),
    (remove_note("kvf-journal"), 3),
    (b"FDSTORE=1", 1),
    (b"FDSTORE=1\nFDNAME=" + b"x" * 300, 1),
    (b"\xff\xfe=\xff\nFDNAME", 1),
]


@pytest.fixture
def held() -> Iterator[Held]:
    with Held() as running:
        running.ready(1)
        yield running


def settled(held: Held) -> dict[int, str]:
    """The descriptors of the keeper, once no caller is connected."""
    held.ask("status")
    found = descriptors(held.process.pid)
    return {fd: target for fd, target in found.items() if "memfd" in target}


def test_words_of_a_stranger_change_nothing(held: Held) -> None:
    before, kept = settled(held), held.ask("status")["held"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger, contextlib.closing(Fd()) as extra:
        stranger.connect(f"{held.base}.hold")
        for payload, count in HOSTILE:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [extra.fd] * count))] if count else []
            stranger.sendmsg([payload], rights)
    wait_until(lambda: held.ask("status")["strangers"] == len(HOSTILE), TIMEOUT, "all messages")
    assert settled(held) == before
    assert held.ask("status")["held"] == kept
    assert 1 <= held.log.count("ignored a message of process") <= 4


class Fd:
    def __init__(self) -> None:
        self.fd = os.memfd_create("stranger")

    def close(self) -> None:
        os.close(self.fd)


def test_a_server_that_stores_too_much_is_refused(held: Held) -> None:
    held.fail("stores too much")
    held.ask("drop", restart=True)
    held.ready(2)
    wait_until(lambda: held.log.count("cannot hold") == 4, TIMEOUT, "the refusals")
    assert len(held.ask("status")["held"]) == 16
    assert len(settled(held)) == 16


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_another_user_reaches_no_socket(held: Held) -> None:
    os.chmod(held.folder, 0o711)
    program = """
import os, socket, sys
os.setgid(12345); os.setuid(12345)
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
    other.connect(sys.argv[1])
"""
    done = ran(sys.executable, "-c", program, f"{held.base}.hold", code=None, timeout=TIMEOUT)
    assert "PermissionError" in done.stderr


@contextlib.contextmanager
def asked(held: Held, packet: bytes) -> Iterator[socket.socket]:
    """A caller that has sent this packet, and reads the reply."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
        ours.settimeout(TIMEOUT)
        sending.connect(f"{held.base}.hold")
        with theirs:
            socket.send_fds(sending, [packet], [theirs.fileno()])
        yield ours


@pytest.mark.parametrize("packet", [b"\xff", b"[]", b"null", b"[" * 3_000, b'{"a":' * 800, b"1", b'{"do"', b" " * 9000])
def test_a_packet_that_is_no_object_has_no_reply(held: Held, packet: bytes) -> None:
    with asked(held, packet) as caller:
        assert caller.recv(100) == b""
    assert held.ask("status")["done"]


@pytest.mark.parametrize("do", ["", "x", "STATUS", None, 1, ["drop"], {"a": 1}])
def test_an_unknown_request_is_refused(held: Held, do: object) -> None:
    assert held.ask(do) == {"done": False, "text": "unknown request"}  # type: ignore[arg-type]


def test_a_caller_that_does_not_read_holds_nobody_up(held: Held) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
        sending.connect(f"{held.base}.hold")
        socket.send_fds(sending, [b'{"do": "status"}'], [writing])
    assert held.ask("status")["done"]
    os.close(reading)
    os.close(writing)


def test_a_caller_that_has_ended_is_no_harm(held: Held) -> None:
    held.fail("hangs")
    with asked(held, b'{"do": "reload"}'):
        wait_until(lambda: len(held.servers()) == 2, TIMEOUT, "two servers")
    assert not held.ask("reload")["done"]
    for pid in held.servers():
        if pid != held.ask("status")["server"]["pid"]:
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: held.ask("drop", restart=True)["done"], TIMEOUT, "the next request")


UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


@pytest.fixture(scope="module")
def namespaces() -> None:
    if not shutil.which("unshare") or subprocess.run([*UNSHARE, "true"], check=False, timeout=60).returncode:
        pytest.skip("needs to make a pid namespace: root and unshare")


def test_it_imports_the_standard_library_and_itself() -> None:
    program = "import kvframework.keeper.supervisor, sys; print(*sorted(name for name in sys.modules))"
    run = ran(sys.executable, "-c", program, timeout=TIMEOUT)
    others = {name.partition(".")[0] for name in run.stdout.split()} - set(sys.stdlib_module_names)
    bare = ran(sys.executable, "-c", "import sys; print(*sys.modules)", timeout=TIMEOUT)
    assert others - {name.partition(".")[0] for name in bare.stdout.split()} == {"kvframework"}
    own = {name for name in run.stdout.split() if name.startswith("kvframework.") and "keeper" not in name}
    assert own == {"kvframework.supervise", "kvframework.supervise.state"}


@pytest.mark.usefixtures("namespaces")
class TestFirstProcess:
    def test_signals_reach_it_and_its_server(self) -> None:
        with Held(within=UNSHARE) as held:
            held.ready(1)
            (first,) = children(held.process.pid)
            os.kill(first, signal.SIGHUP)
            wait_until(lambda: held.reports()[-1]["event"] == "SIGHUP", TIMEOUT, "SIGHUP")
            os.kill(first, signal.SIGTERM)
            assert held.process.wait(TIMEOUT) == 0

    def test_it_reaps_orphans(self) -> None:
        with Held(within=UNSHARE, fails="leaves an orphan") as held:
            held.ready(1)
            (first,) = children(held.process.pid)
            wait_until(lambda: len(children(first)) == 1, TIMEOUT, "the end of the orphan")
