"""HAND_OVER from those that may not ask, with paths where no server listens, and twice at once: the server goes on, and
L1 is handed over whole or not at all."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvframework.cli import serving as takeover
from kvframework.client import KVClient
from kvframework.errors import KVFrameworkError, RequestError
from kvframework.server import Server
from kvframework.service.operator_requests import HandOver
from kvframework.storage.l1.journal import PREFIX, SCHEMA
from kvframework.storage.recovery import ARENA, JOURNAL
from kvframework.wire import messages as m
from tests.core.security.another_user import NOBODY, as_another_user, needs_root
from tests.core.server.in_process import serving
from tests.support.server_process import ServerProcess, fixture_of
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

TIMEOUT = 60.0


server = fixture_of(serving)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, for the paths of sockets."""
    with tempfile.TemporaryDirectory(prefix="kvf-") as directory:
        yield Path(directory)


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(path))
        listener.listen(4)
        yield listener


def received(listener: socket.socket) -> list[int]:
    """What was sent there until now."""
    listener.settimeout(0.0)
    try:
        connection, _ = listener.accept()
    except BlockingIOError:
        return []
    with connection:
        connection.settimeout(TIMEOUT)
        return list(socket.recv_fds(connection, 64, 4)[1])


def serves_on(client: WireClient) -> None:
    """It stores, and has what was stored."""
    key = key_for(client.register(), [7] * 256)
    client.store(key, b"x")
    found = client.retrieve(key)
    assert found is not None
    assert set(found) == {ord("x")}


class Client:
    """A client as the handler sees it."""

    session_id, pid, name = 1, 7, "next"

    def __init__(self, *, local: bool) -> None:
        self.local = local
        self.ends = socket.socketpair()

    def liveness_fd(self) -> int | None:
        return os.dup(self.ends[0].fileno())

    def close(self) -> None:
        for end in self.ends:
            end.close()


@pytest.mark.parametrize(("local", "euid"), [(False, os.geteuid()), (True, os.geteuid() + 1)])
def test_neither_a_remote_client_nor_another_user_gets_anything(
    local: bool, euid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def descriptors() -> list[int]:
        asked.append("descriptors")
        return []

    (handler,) = HandOver(descriptors, lambda: asked.append("stop")).handlers()
    monkeypatch.setattr(os, "geteuid", lambda: euid)
    with contextlib.closing(Client(local=local)) as client, pytest.raises(RequestError, match="server's own user"):
        handler.call(client, m.HandOver("/nowhere"), ())  # type: ignore[arg-type]
    assert asked == []


@needs_root
def test_an_admitted_user_may_not_take_over(folder: Path) -> None:
    running = ServerProcess(f"server.admit_uids=[{NOBODY}]")
    os.chmod(os.path.dirname(running.endpoint.removeprefix("ipc://")), 0o711)
    folder.chmod(0o777)

    def asks() -> str:
        with listening(folder / "s"), WireClient(running.endpoint, timeout=TIMEOUT) as client:
            try:
                client.call("HAND_OVER", m.HandOver(str(folder / "s")))
            except KVFrameworkError as error:
                return f"{error.code}: {error.fact}"
        return "done"

    with running:
        assert as_another_user(asks).startswith("request.invalid: only a process of the server's own user")
        with running.client() as client:
            serves_on(client)


@pytest.mark.parametrize(
    "what", ["nothing", "a file", "a folder", "a socket of datagrams", "a socket without listener"]
)
def test_where_no_server_listens_it_is_refused_and_the_server_goes_on(server: Server, folder: Path, what: str) -> None:
    path = folder / "s"
    with contextlib.ExitStack() as stack, WireClient(server.endpoint, timeout=TIMEOUT) as client:
        if what == "a file":
            path.write_text("")
        elif what == "a folder":
            path.mkdir()
        elif what != "nothing":
            kind = socket.SOCK_DGRAM if "datagrams" in what else socket.SOCK_STREAM
            stack.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX, kind))).bind(str(path))
        with pytest.raises(RequestError, match="L1 cannot be handed over"):
            client.call("HAND_OVER", m.HandOver(str(path)))
        serves_on(client)


@pytest.mark.parametrize("path", ["", "x" * 108, "\N{GREEK SMALL LETTER ALPHA}" * 107, "a\0b"])
def test_what_is_no_path_of_a_socket_is_refused(server: Server, path: str) -> None:
    with WireClient(server.endpoint, timeout=TIMEOUT) as client:
        with pytest.raises(KVFrameworkError):
            client.call("HAND_OVER", m.HandOver(path))
        serves_on(client)


def test_twice_at_once_ends_the_server_once_with_one_arena(server: Server, folder: Path) -> None:
    """Both may get it: the lock of the arena decides who serves."""
    with listening(folder / "a") as one, listening(folder / "b") as other:
        with WireClient(server.endpoint, timeout=TIMEOUT) as first, WireClient(server.endpoint) as second:
            serves_on(first)
            first.send("HAND_OVER", m.HandOver(str(folder / "a")))
            second.send("HAND_OVER", m.HandOver(str(folder / "b")))
            wait_until(lambda: not is_bound(server), TIMEOUT, "the end of the server")
        handed = [pair for listener in (one, other) if (pair := received(listener))]
    try:
        assert handed
        files = {tuple((os.fstat(fd).st_dev, os.fstat(fd).st_ino) for fd in pair) for pair in handed}
        assert len(files) == 1
        _, journal = handed[0]
        assert PREFIX.unpack(os.pread(journal, PREFIX.size, 0))[1] == SCHEMA
    finally:
        for pair in handed:
            for fd in pair:
                os.close(fd)


def test_a_takeover_in_the_middle_of_another_disturbs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each listens at a path of its own."""
    handed_over = takeover._handed_over

    def after_another(client: KVClient, path: str, listener: socket.socket, keeper: None) -> dict[str, int]:
        other = subprocess.run([sys.executable, "-c", ANOTHER, server.endpoint], capture_output=True, check=False)
        assert other.returncode == 0, other.stderr
        return handed_over(client, path, listener, keeper)

    monkeypatch.setattr(takeover, "_handed_over", after_another)
    with ServerProcess() as server:
        # The listener alone: the other one does not ask.
        kept = takeover.take_over(server.endpoint, None).kept((ARENA, JOURNAL))
        assert len(kept) == 2
        for fd in kept.values():
            os.close(fd)


ANOTHER = """
import sys
from kvframework.cli import serving as takeover
takeover._handed_over = lambda *_: sys.exit(0)
takeover.take_over(sys.argv[1], None)
"""


def test_a_node_without_memory_for_a_larger_l1_keeps_its_server() -> None:
    with ServerProcess() as server:
        server.set("l1.capacity=64TiB")
        assert server._begun("--takeover").wait(TIMEOUT) == 2
        assert "L1 would grow from 64.0 MiB to 64.0 TiB" in server.log
        with server.client() as client:
            serves_on(client)


def is_bound(server: Server) -> bool:
    return os.path.exists(server.endpoint.removeprefix("ipc://"))
