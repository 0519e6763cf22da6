"""`kvframework status` against a real server, and without one. A configuration of `observe` that cannot work is refused
before anything starts, with its place."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import pytest

from kvf_observe import settings
from kvf_observe.http.messages import is_loopback
from kvframework.api.endpoint import ObserveConfig, parse_listen
from kvframework.config.load import load_config
from kvframework.errors import ConfigFieldError, EndpointError
from tests.core.cli.command import run
from tests.support.server_process import ServerProcess


def status(*arguments: str, columns: int = 200) -> subprocess.CompletedProcess[str]:
    return run("status", *arguments, COLUMNS=str(columns))


def test_status_shows_instances_and_l1() -> None:
    with ServerProcess() as server, server.client() as client:
        client.register(model_name="m[bold]x")
        shown = status("--endpoint", server.endpoint)
        assert shown.returncode == 0
        assert "L1 0 B of 64.0 MiB" in shown.stdout
        assert "m[bold]x" in shown.stdout
        document = json.loads(status("--endpoint", server.endpoint, "--json").stdout)
        assert document["instances"][0]["model"] == "m[bold]x"
        assert document["server"]["chunk_size"] == 256


def test_a_pipe_gets_one_line_for_each_tier(tmp_path: Path) -> None:
    with ServerProcess("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}") as server:
        shown = status("--endpoint", server.endpoint, columns=40).stdout
        (line,) = [line for line in shown.splitlines() if line.startswith("L2 ")]
        assert line.startswith("L2 filesystem: circuit ")
        assert line.endswith(" to write")


def test_without_a_server_the_error_says_what_to_do() -> None:
    shown = status("--endpoint", "ipc:///tmp/kvf-nobody/s.sock", "--timeout", "0.3")
    assert shown.returncode == 2
    assert "run.server_gone" in shown.stderr
    assert "kvframework serve" in shown.stderr
    assert shown.stderr.count("run.server_gone") == 1
    assert "Traceback" not in shown.stderr


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
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "::", "10.0.0.1", "node.example")))
