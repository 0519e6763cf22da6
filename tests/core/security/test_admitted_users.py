"""`[server] admit_uids`: processes of the named users are served like the server's own, others are not."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvframework.client import KVClient
from kvframework.config.endpoint import trusted_server_uid
from kvframework.config.load import load_config
from kvframework.errors import EndpointError, KVFrameworkError
from kvframework.registry.registry import PluginRegistry
from tests.core.cli.command import run
from tests.core.security.another_user import NOBODY, as_another_user, needs_root
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

STRANGER = NOBODY - 1
VARIABLE = "KVFRAMEWORK_SERVER_UID"
PLUGINS = PluginRegistry()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    running = ServerProcess(f"server.admit_uids=[{NOBODY}]")
    os.chmod(os.path.dirname(running.endpoint.removeprefix("ipc://")), 0o711)
    with running:
        # Another user may not read the packages here: what a client loads is loaded before the fork.
        with KVClient(running.endpoint, plugins=PLUGINS) as client:
            assert client.wait_up(60.0)
            assert client.maps_arena
        yield running


def asks(endpoint: str, server_uid: str) -> str:
    """What becomes of a client of this process: the code of its error, or whether it maps the arena."""
    os.environ[VARIABLE] = server_uid
    options: dict[str, Any] = {"connect_timeout_s": 5.0, "deadline_scale": 20.0, "plugins": PLUGINS}
    with KVClient(endpoint, name="another user", **options) as client:
        if client.wait_up(60.0 if os.geteuid() == NOBODY and server_uid else 5.0):
            return f"maps {client.maps_arena}"
        try:
            client.raise_down()
        except KVFrameworkError as error:
            return error.code
    return "down without a reason"


@needs_root
def test_an_admitted_user_is_served_and_maps_the_arena(server: ServerProcess) -> None:
    path = server.endpoint.removeprefix("ipc://")
    assert [stat.S_IMODE(os.stat(path + end).st_mode) for end in ("", ".live", ".lock")] == [0o666, 0o666, 0o600]
    assert as_another_user(lambda: asks(server.endpoint, "0")) == "maps True"
    wait_until(lambda: all(s["name"] != "another user" for s in server.status()["messaging"]["sessions"]))


@needs_root
def test_a_user_that_is_not_named_gets_no_answer(server: ServerProcess) -> None:
    assert as_another_user(lambda: asks(server.endpoint, "0"), STRANGER) == "run.server_gone"
    assert server.status()["messaging"]["counters"]["sessions_opened"] >= 1, "the server serves on"


@needs_root
def test_a_client_trusts_no_other_users_server_unless_it_is_named(server: ServerProcess) -> None:
    assert as_another_user(lambda: asks(server.endpoint, "")) == "config.endpoint"


@pytest.mark.parametrize("text", ["-1", "root", "4294967295", "1 ", "\u0661"])
def test_a_user_is_named_by_its_number(text: str) -> None:
    with pytest.raises(EndpointError, match="is not a user id"):
        trusted_server_uid({VARIABLE: text})


def test_without_a_name_a_client_trusts_its_own_user() -> None:
    assert trusted_server_uid({}) == trusted_server_uid({VARIABLE: ""}) == os.getuid()
    assert trusted_server_uid({VARIABLE: "10001"}) == 10001


def config_with(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "kvf.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("uids", ["[-1]", "[4294967295]", '["nobody"]', "1000"])
def test_what_is_no_list_of_users_is_refused(tmp_path: Path, uids: str) -> None:
    with pytest.raises(KVFrameworkError, match="admit_uids"):
        load_config(config_with(tmp_path, f"[server]\nadmit_uids = {uids}\n"))


def test_over_tcp_nobody_is_admitted_by_a_uid(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="local socket"):
        load_config(
            config_with(tmp_path, '[server]\nendpoint = "tcp://127.0.0.1:1"\ninsecure = true\nadmit_uids = [1000]\n')
        )


def test_the_default_directory_is_not_shared(tmp_path: Path) -> None:
    checked = run("config", "check", str(config_with(tmp_path, "[server]\nadmit_uids = [1000]\n")))
    assert checked.returncode == 2
    assert "[server] admit_uids names other users" in " ".join(checked.stderr.split())


def test_a_directory_that_they_may_not_enter_is_refused() -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = config_with(
            Path(directory), f'[server]\nendpoint = "ipc://{directory}/s"\nadmit_uids = [1000]\n[l1]\ncapacity="1MiB"'
        )
        checked = run("config", "check", str(file))
        assert checked.returncode == 2
        assert f"chmod 711 {directory}" in " ".join(checked.stderr.split())
        os.chmod(directory, 0o711)
        checked = run("config", "check", str(file))
        assert checked.returncode == 0, checked.stderr
