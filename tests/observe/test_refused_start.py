"""A configuration of `observe` that cannot work is refused before anything starts, with its place."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvf_observe import settings
from kvf_observe.http import settings as http_settings
from kvframework.api.endpoint import ObserveConfig, parse_listen
from kvframework.config.load import load_config
from kvframework.errors import ConfigFieldError, EndpointError
from tests.core.cli.command import run


@pytest.mark.parametrize(
    ("listen", "parsed"),
    [
        ("127.0.0.1:9309", ("127.0.0.1", 9309)),
        ("[::1]:0", ("::1", 0)),
        ("*:80", ("", 80)),
        ("node.example:65535", ("node.example", 65535)),
    ],
)
def test_addresses(listen: str, parsed: tuple[str, int]) -> None:
    assert parse_listen(listen) == parsed


@pytest.mark.parametrize(
    "listen", ["", "9309", ":9309", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "http://x:1", "a b:1"]
)
def test_what_is_no_address(listen: str) -> None:
    with pytest.raises(EndpointError, match="is not a host and a port"):
        parse_listen(listen)


def test_without_the_table_nothing_is_observed() -> None:
    assert load_config(environ={}).observe is None
    assert load_config(overrides=["observe.listen=[::1]:1"], environ={}).observe == ObserveConfig("[::1]:1")


@pytest.mark.parametrize("override", ["observe.listen=x", "observe.tls_cert=a", "observe.port=1"])
def test_the_table_is_checked(override: str) -> None:
    with pytest.raises((EndpointError, ConfigFieldError), match=r"\[observe\]"):
        load_config(overrides=[override], environ={})


def test_files_are_checked(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for files in (
        {"tls_cert": "none", "tls_key": "none"},
        {"token_file": str(tmp_path / "none")},
        {"token_file": str(tmp_path / "empty")},
    ):
        (refusal,) = settings.refusals(ObserveConfig("127.0.0.1:0", **files), "[observe]")
        assert isinstance(refusal, ConfigFieldError)


def test_a_taken_port_is_refused_unless_a_server_runs_that_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ObserveConfig(f"127.0.0.1:{taken.getsockname()[1]}")
        (refusal,) = settings.refusals(config, "[observe]")
        assert isinstance(refusal, EndpointError)
        (bare,) = settings.refusals(config, "")
        assert config.listen in str(bare)
        assert list(settings.refusals(config, "[observe]", running=True)) == []
        done = run("config", "check", "--set", f"observe.listen={config.listen}", "--set", "l1.capacity=1MiB")
        assert done.returncode == 2
        assert "the HTTP listener cannot use the address: Address already in use" in done.stderr
        assert run("observe", "--listen", config.listen).returncode == 2


def test_an_endpoint_that_is_none_is_refused() -> None:
    done = run("observe", "--listen", "127.0.0.1:0", "--endpoint", "nowhere")
    assert done.returncode == 2
    assert "'nowhere' is not an endpoint" in done.stderr


def test_one_of_two_files_is_wrong_usage() -> None:
    assert run("observe", "--tls-cert", "c.pem").returncode == 2


def test_addresses_of_this_machine_alone() -> None:
    assert all(map(http_settings.is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(http_settings.is_loopback, ("", "0.0.0.0", "::", "10.0.0.1", "node.example")))
