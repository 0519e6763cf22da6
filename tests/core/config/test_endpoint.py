"""Endpoints: their text, the default, and the privacy of a socket's directory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from kvframework.api.endpoint import Endpoint, parse_endpoint
from kvframework.config import endpoint
from kvframework.config.endpoint import default_directory, default_endpoint, prepare_private_directory
from kvframework.errors import EndpointError


def test_an_ipc_endpoint_is_an_absolute_path() -> None:
    assert parse_endpoint("ipc:///run/me/kvf.sock") == Endpoint("ipc", path="/run/me/kvf.sock")


@pytest.mark.parametrize(
    "text",
    ["", "ipc://", "ipc://kvf.sock", "ipc://@abstract", "ipc:///run/", "ipc:///a\0b", "/run/kvf.sock", "inproc://x"],
)
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(EndpointError, match="ipc:// and an absolute path"):
        parse_endpoint(text)


def test_a_tcp_endpoint_is_a_host_and_a_port() -> None:
    assert parse_endpoint("tcp://127.0.0.1:5555") == Endpoint("tcp", host="127.0.0.1", port=5555)
    assert parse_endpoint("tcp://cache-1.lan:1") == Endpoint("tcp", host="cache-1.lan", port=1)
    assert parse_endpoint("tcp://[::1]:65535") == Endpoint("tcp", host="::1", port=65535)


@pytest.mark.parametrize("rest", ["", ":5", "host", "host:", "host:0", "host:65536", "host:5555/", "::1:5", "[red]x:1"])
def test_what_is_no_tcp_endpoint_is_refused(rest: str) -> None:
    with pytest.raises(EndpointError, match="is not a host and a port"):
        parse_endpoint(f"tcp://{rest}")


def test_the_path_and_the_liveness_sockets_fit_into_a_socket_address() -> None:
    longest = "/" + "a" * 99
    assert parse_endpoint(f"ipc://{longest}").path == longest
    assert len(f"{longest}.live") <= 107
    with pytest.raises(EndpointError, match="101 bytes") as caught:
        parse_endpoint(f"ipc://{longest}a", where="here")
    assert caught.value.where == "here"
    with pytest.raises(EndpointError, match="bytes"):
        parse_endpoint("ipc:///" + "ä" * 60)


def test_the_default_is_in_the_runtime_directory_if_it_is_ours(tmp_path: Path) -> None:
    assert default_endpoint({"XDG_RUNTIME_DIR": str(tmp_path)}) == f"ipc://{tmp_path}/kvframework/server.sock"
    own = Path(tempfile.gettempdir(), f"kvframework-{os.getuid()}")
    for runtime in ("", "relative", str(tmp_path / "none")):
        assert default_directory({"XDG_RUNTIME_DIR": runtime}) == own
    assert default_directory({}) == own


def test_a_read_only_root_has_a_default_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container without /tmp, where the server's directory is a volume."""

    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert default_directory({}) == Path(f"/tmp/kvframework-{os.getuid()}")


def test_the_runtime_directory_of_another_user_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    assert default_directory({"XDG_RUNTIME_DIR": str(tmp_path)}).name == f"kvframework-{os.getuid()}"


def test_a_directory_is_made_private_and_then_accepted(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    prepare_private_directory(path)
    assert path.stat().st_mode & 0o777 == 0o700
    prepare_private_directory(path)


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    for mode in (0o770, 0o702, 0o1777):
        tmp_path.chmod(mode)
        with pytest.raises(EndpointError, match="others may write to the directory"):
            prepare_private_directory(tmp_path)
    tmp_path.chmod(0o755)
    prepare_private_directory(tmp_path)


def test_nobody_else_may_enter_the_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "default_directory", lambda: tmp_path)
    tmp_path.chmod(0o711)
    with pytest.raises(EndpointError, match="others may use the directory"):
        prepare_private_directory(tmp_path)
    tmp_path.chmod(0o700)
    prepare_private_directory(tmp_path)


def test_another_users_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(EndpointError, match=f"belongs to uid {uid}, not to {uid + 1}"):
        prepare_private_directory(tmp_path)


def test_a_symbolic_link_is_refused_wherever_it_leads(tmp_path: Path) -> None:
    for name, target, text in (("link", tmp_path, "symbolic link"), ("dangling", tmp_path / "none", "cannot be made")):
        (tmp_path / name).symlink_to(target)
        with pytest.raises(EndpointError, match=text):
            prepare_private_directory(tmp_path / name)


def test_what_cannot_be_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(EndpointError, match="cannot be made"):
            prepare_private_directory(path)
