"""Endpoints: their text, the default, and the privacy of a socket's directory. `[tenants.NAME]`: what is refused, with
its place and never with a salt; and the bytes of a share."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from kvframework.api.endpoint import Endpoint, parse_endpoint
from kvframework.api.keys import tenant_digest
from kvframework.config import endpoint
from kvframework.config.endpoint import default_directory, default_endpoint, prepare_private_directory
from kvframework.config.load import load_config
from kvframework.config.schema import Config
from kvframework.config.tenants import bytes_of_tenants
from kvframework.errors import ConfigFieldError, EndpointError


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
        with pytest.raises(EndpointError, match="other users may write to the directory"):
            prepare_private_directory(tmp_path)
    tmp_path.chmod(0o755)
    prepare_private_directory(tmp_path)


def test_nobody_else_may_enter_the_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "default_directory", lambda: tmp_path)
    tmp_path.chmod(0o711)
    with pytest.raises(EndpointError, match="other users may use the directory"):
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


A, B = tenant_digest("salt of a"), tenant_digest("salt of b")


def load(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "kvf.toml"
    path.write_text(text)
    return load_config(path, environ={})


def test_a_digest_is_that_of_the_documentation() -> None:
    assert tenant_digest("s3cret") == "2da912e4dcb976b9df9fc10609089913"


def test_shares_are_percents_or_sizes(tmp_path: Path) -> None:
    text = f"""
        [tenants.search]
        salts = ["{A}"]
        min = "20%"
        max = "62.5 %"
        [tenants.chat-2]
        salts = ["{B}"]
        min = "1 KiB"
    """
    config = load(tmp_path, text)
    assert [tenant.name for tenant in config.tenants] == ["search", "chat-2"]
    assert bytes_of_tenants(config.tenants, 10_000) == [(2000, 6250), (1024, 10_000)]
    assert load(tmp_path, "").tenants == ()


@pytest.mark.parametrize(
    ("text", "place", "fact"),
    [
        ('[tenants.a]\nsalts = ["plain-text-salt"]', "[tenants.a] salts #1", "not the digest"),
        (f'[tenants.a]\nsalts = ["{A.upper()}"]', "[tenants.a] salts #1", "not the digest"),
        (f'[tenants.a]\nsalts = ["{A}"]\n[tenants.b]\nsalts = ["{B}", "{A}"]', "[tenants.b] salts #2", "[tenants.a]"),
        (f'[tenants.a]\nsalts = ["{A}"]\nmin = "30%"\nmax = "20%"', "[tenants.a]", "min 30% is more than max 20%"),
        (f'[tenants.a]\nsalts = ["{A}"]\nmin = "2GiB"\nmax = "1GiB"', "[tenants.a]", "min 2GiB is more"),
        (
            f'[tenants.a]\nsalts = ["{A}"]\nmin = "60%"\n[tenants.b]\nsalts = ["{B}"]\nmin = "40.5%"',
            "[tenants.b]",
            "100.5 %",
        ),
        (f'[tenants.a]\nsalts = ["{A}"]\nmax = "101%"', "[tenants.a] max", "not a share"),
        (f'[tenants.a]\nsalts = ["{A}"]\nmax = "much"', "[tenants.a] max", "not a share"),
        (f'[tenants.a]\nsalts = ["{A}"]\nload_bandwidth = "2GB"', "[tenants.a] load_bandwidth", "is not a rate"),
        (f'[tenants.a]\nsalts = ["{A}"]\nload_bandwidth = "0B/s"', "[tenants.a] load_bandwidth", "is not a rate"),
        (f'[tenants.a]\nsalts = ["{A}"]\nmaximum = "1%"', "[tenants.a]", "unknown key 'maximum'"),
        (f'[tenants.other]\nsalts = ["{A}"]', "[tenants.other]", "is not a tenant name"),
        (f'[tenants."a b"]\nsalts = ["{A}"]', "[tenants.a b]", "is not a tenant name"),
        (f'[tenants.{"a" * 33}]\nsalts = ["{A}"]', f"[tenants.{'a' * 33}]", "is not a tenant name"),
        ("[tenants.a]\nsalts = []", "[tenants.a] salts", "length"),
        ("[tenants.a]\nmin = '1%'", "[tenants.a]", "salts"),
        ("tenants = 3", "[tenants]", "expected a table"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, place: str, fact: str) -> None:
    with pytest.raises(ConfigFieldError) as caught:
        load(tmp_path, text)
    assert place in caught.value.where
    assert fact in caught.value.fact
    assert "plain-text-salt" not in str(caught.value)


def test_more_than_64_tenants_are_refused(tmp_path: Path) -> None:
    tables = [f'[tenants.t{number}]\nsalts = ["{tenant_digest(str(number))}"]' for number in range(65)]
    assert len(load(tmp_path, "\n".join(tables[:64])).tenants) == 64
    with pytest.raises(ConfigFieldError, match="65 tenants"):
        load(tmp_path, "\n".join(tables))


def test_with_the_capacity_sizes_and_percents_are_compared(tmp_path: Path) -> None:
    one = f'[tenants.a]\nsalts = ["{A}"]\nmin = "1KiB"\n'
    config = load(tmp_path, one + 'max = "10%"')
    assert bytes_of_tenants(config.tenants, 20_000) == [(1024, 2000)]
    with pytest.raises(ConfigFieldError, match="min 1KiB is more than max 10%"):
        bytes_of_tenants(config.tenants, 5000)
    two = load(tmp_path, one + f'[tenants.b]\nsalts = ["{B}"]\nmin = "50%"')
    with pytest.raises(ConfigFieldError, match="add up to"):
        bytes_of_tenants(two.tenants, 2000)
