"""Another user of the machine can neither connect nor map, and cannot pose as the server."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvframework.api.plugin import TableContext
from kvframework.client import KVClient
from kvframework.errors import ConfigFieldError, EndpointError, ServerGone
from kvframework.wire import messages as m
from kvframework.wire.frames import join
from tests.core.cli.command import run
from tests.core.security.another_user import NOBODY, as_another_user, needs_root
from tests.support.server_process import ServerProcess, server_fixture
from tests.support.waiting import wait_until

HUNG_UP = ("closed", "ConnectionResetError", "BrokenPipeError")


server = server_fixture(scope="module")


def socket_path(server: ServerProcess) -> str:
    return server.endpoint.removeprefix("ipc://")


def connect(path: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(5)
        sock.connect(path)
        sock.sendall(bytes(16))
        return sock.recv(1).hex() or "closed"


def memfd_of(pid: int) -> str:
    """The arena's descriptor, as its own user finds it."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        if "kvframework-l1" in os.readlink(f"/proc/{pid}/fd/{name}"):
            return name
    raise AssertionError("no arena")


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o755], ids=["as made", "a directory that all may enter"])
def test_neither_socket_lets_another_user_in(server: ServerProcess, mode: int) -> None:
    path = socket_path(server)
    for each in (path, path + ".live"):
        assert stat.S_IMODE(os.stat(each).st_mode) & 0o077 == 0
    os.chmod(os.path.dirname(path), mode)
    try:
        assert [as_another_user(lambda: connect(each)) for each in (path, path + ".live")] == ["PermissionError"] * 2  # noqa: B023
    finally:
        os.chmod(os.path.dirname(path), 0o700)


@needs_root
def test_the_kernel_tells_the_server_who_connects(server: ServerProcess) -> None:
    """Also where somebody has opened modes that the server had set."""
    path = socket_path(server)
    os.chmod(os.path.dirname(path), 0o711)
    for each in (path, path + ".live"):
        os.chmod(each, 0o666)
    before = refused(server)
    try:
        assert as_another_user(lambda: connect(path + ".live")) in HUNG_UP
        assert as_another_user(lambda: hello(server.endpoint)) == "silence"
        assert as_another_user(lambda: os.geteuid()) == NOBODY
    finally:
        os.chmod(os.path.dirname(path), 0o700)
    assert refused(server) > before
    with KVClient(server.endpoint) as client:
        assert client.wait_up(20)
        assert client.maps_arena


def refused(server: ServerProcess) -> int:
    with server.client() as client:
        return int(client.status()["messaging"]["counters"].get("liveness_refused", 0))


def hello(endpoint: str) -> str:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoint)
        dealer.send_multipart(join(1, "HELLO", m.Hello("stranger", 1)))
        return "an answer" if dealer.poll(1000) else "silence"


@needs_root
def test_the_arena_cannot_be_reached_through_proc(server: ServerProcess) -> None:
    arena = f"/proc/{server.pid}/fd/{memfd_of(server.pid)}"
    with open(arena, "rb") as mine:
        assert mine.read(1) is not None
    assert as_another_user(lambda: os.open(arena, os.O_RDONLY)) == "PermissionError"
    assert as_another_user(lambda: os.listdir(f"/proc/{server.pid}/fd")) == "PermissionError"
    assert as_another_user(lambda: os.open(f"/proc/{server.pid}/mem", os.O_RDONLY)) == "PermissionError"
    assert as_another_user(lambda: Path(f"/proc/{server.pid}/environ").read_bytes().hex()) == "PermissionError"


@needs_root
def test_secret_keys_and_the_tier_of_files_are_their_owners(tmp_path: Path) -> None:
    from kvf_filesystem import FilesystemOptions
    from kvf_filesystem.tier import open_tier

    for folder in (tmp_path, *tmp_path.parents[:2]):
        os.chmod(folder, 0o755)
    assert run("keys", "new", str(tmp_path / "keys")).returncode == 0
    for secret in ("server.secret", "client.secret"):
        assert as_another_user(lambda: (tmp_path / "keys" / secret).read_text()) == "PermissionError"  # noqa: B023
    assert as_another_user(lambda: os.listdir(tmp_path / "keys" / "clients")) == "PermissionError"
    tier = open_tier(FilesystemOptions(path=str(tmp_path / "tier")), where="[[l2]] #1")
    try:
        assert as_another_user(lambda: os.listdir(tmp_path / "tier")) == "PermissionError"
    finally:
        tier.close()


@pytest.fixture
def impostor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, zmq.Socket[bytes]]]:
    """Somebody listens where the server would."""
    directory = tmp_path_factory.mktemp("s")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(f"ipc://{directory}/s.sock")
        yield directory, router


def assert_not_spoken_to(directory: Path, router: zmq.Socket[bytes], why: str) -> None:
    with KVClient(f"ipc://{directory}/s.sock", connect_timeout_s=5.0) as client:
        wait_until(lambda: isinstance(client._connection.last_error, EndpointError))
        with pytest.raises(EndpointError, match=why):
            client.raise_down()
    assert not router.poll(100), "not a word was said to it"


def test_a_client_says_nothing_where_others_may_have_put_a_server(impostor: tuple[Path, zmq.Socket[bytes]]) -> None:
    directory, router = impostor
    os.chmod(directory, 0o777)
    assert_not_spoken_to(directory, router, "other users may write to the directory")


@needs_root
def test_a_client_says_nothing_in_the_directory_of_another_user(impostor: tuple[Path, zmq.Socket[bytes]]) -> None:
    directory, router = impostor
    os.chown(directory, NOBODY, NOBODY)
    assert_not_spoken_to(directory, router, f"belongs to uid {NOBODY}")


def test_a_client_that_finds_no_directory_says_that_nobody_serves(tmp_path: Path) -> None:
    with KVClient(f"ipc://{tmp_path}/none/s", connect_timeout_s=0.2) as client, pytest.raises(ServerGone):
        _ = client.hello


def test_a_folder_that_everybody_may_write_to_is_no_tier(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from kvf_filesystem import FilesystemOptions, kvf_tiers

    (provider,) = kvf_tiers()
    folder = tmp_path / "shared"
    folder.mkdir()
    for mode in (0o777, 0o1777, 0o703):
        os.chmod(folder, mode)
        with pytest.raises(ConfigFieldError, match="any user may write") as caught:
            provider.create(FilesystemOptions(path=str(folder)), TableContext("[[l2]] #1"))
        assert "use a folder inside this folder, or remove the permission: chmod o-w" in caught.value.hint
    inside = folder / "tier"
    provider.create(FilesystemOptions(path=str(inside)), TableContext("[[l2]] #1")).close()
    assert stat.S_IMODE(inside.stat().st_mode) == 0o700
    if os.geteuid() == 0:
        os.chown(inside, NOBODY, NOBODY)
        provider.create(FilesystemOptions(path=str(inside)), TableContext("[[l2]] #1")).close()
        assert f"uid {NOBODY} owns the folder" in caplog.text
