"""`kvframework config apply` and SIGHUP at a server process."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.core.cli.command import run, run_process
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until


class FileServer(ServerProcess):
    def __init__(self, program: Sequence[str] = ("-m", "kvframework.cli.main")) -> None:
        super().__init__(program=program)
        self.file = Path(self._directory.name) / "kvf.toml"
        self._settings = (f"server.endpoint={self.endpoint}",)
        self.write()

    def write(self, capacity: str = "16MiB", log: str = "") -> None:
        self.file.write_text(f'[l1]\nuse = "pinned"\ncapacity = "{capacity}"\n{log}')

    def hang_up(self) -> None:
        os.kill(self.pid, signal.SIGHUP)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    made = FileServer()
    monkeypatch.setenv("KVFRAMEWORK_CONFIG", str(made.file))
    with made as running:
        yield running


def apply(server: FileServer, *arguments: str) -> tuple[int, str]:
    endpoint = f"server.endpoint={server.endpoint}"
    done = run("config", "apply", str(server.file), "--set", endpoint, *arguments)
    return done.returncode, done.stdout + done.stderr


def test_a_change_is_shown_and_in_force(server: FileServer) -> None:
    assert apply(server) == (0, "the configuration has not changed\n")
    status, text = apply(server, "--set", "log.level=debug", "--dry-run")
    assert status == 0
    assert "log.level" in text
    assert "dry run: nothing has changed" in text
    status, text = apply(server, "--set", "log.level=debug", "--set", "log.format=json")
    assert (status, text.splitlines()[-1]) == (0, "changed keys: 2")
    wait_until(lambda: '"message": "configuration: ' in server.log, what="a line of JSON")
    assert "has not changed" in apply(server, "--set", "log.level=debug", "--set", "log.format=json")[1]


def test_one_key_that_needs_a_restart_keeps_all_back(server: FileServer) -> None:
    arguments = ("--set", "log.level=debug", "--set", "l1.capacity=32MiB")
    status, text = apply(server, *arguments)
    assert status == 1
    lines = [line.split() for line in text.splitlines()]
    assert ["log.level", '"info"', '"debug"', "now"] in lines
    assert ["l1.capacity", '"16MiB"', '"32MiB"', "needs", "restart"] in lines
    assert text.splitlines()[-1] == "nothing has changed: 1 of 2 changed keys need a restart"
    document = json.loads(apply(server, *arguments, "--json")[1])
    assert document["applied"] is False
    assert {each["key"]: each["now"] for each in document["changes"]} == {"log.level": True, "l1.capacity": False}
    assert apply(server) == (0, "the configuration has not changed\n")


def test_a_refused_configuration_is_an_error_of_the_command(server: FileServer) -> None:
    status, text = apply(server, "--set", "l2.0.use=filesystem", "--set", "l2.0.path=/etc/passwd/x")
    assert status == 2
    assert "[[l2]] #1" in text
    assert apply(server) == (0, "the configuration has not changed\n")


def test_no_server_is_an_error_of_the_command(tmp_path: Path) -> None:
    done = run("config", "apply", "--endpoint", f"ipc://{tmp_path}/none.sock", "--timeout", "0.2")
    assert done.returncode == 2
    assert "no server answers" in done.stderr


def test_sighup_reads_the_file_again_all_or_nothing(server: FileServer) -> None:
    server.hang_up()
    wait_until(lambda: "SIGHUP: the configuration has not changed" in server.log)
    server.write(capacity="32MiB", log='[log]\nlevel = "debug"\n')
    server.hang_up()
    wait_until(lambda: "nothing has changed, because these keys need a restart: l1.capacity" in server.log)
    server.file.write_text("[l1")
    server.hang_up()
    wait_until(lambda: "SIGHUP: nothing has changed, because the configuration is wrong:" in server.log)
    server.file.unlink()
    os.mkfifo(server.file)
    server.hang_up()
    wait_until(lambda: "a pipe cannot be read twice" in server.log)
    server.file.unlink()
    server.write(log='[log]\nlevel = "debug"\n')
    server.hang_up()
    wait_until(lambda: 'configuration: log.level = "debug", was "info"' in server.log)
    assert "Traceback" not in server.log
    assert server.status()["l1"]["capacity_bytes"] == 16 << 20


DEEP = {
    "key": ".".join(["a"] * 3000) + " = 1\n",
    "name": "[" + ".".join(["a"] * 3000) + "]\n",
    "tenant": "[tenants." + ".".join(["a"] * 3000) + "]\n",
    "arrays": "a = " + "[" * 3000 + "]" * 3000 + "\n",
    "tables": "a = " + "{a = " * 3000 + "1" + "}" * 3000 + "\n",
}


@pytest.mark.parametrize("name", DEEP)
def test_what_is_nested_thousands_deep_is_refused_by_each_reader_of_the_file(server: FileServer, name: str) -> None:
    server.file.write_text(f"# a comment\n{DEEP[name]}")
    refused = f"[config.field] {server.file}: line 2: "
    for done in (run("config", "check", str(server.file)), run_process("serve", "--config", str(server.file))):
        assert done.returncode == 2, done.args
        assert refused in done.stderr, done.args
        assert "hint: " in done.stderr
        assert "Traceback" not in done.stderr
    status, text = apply(server)
    assert (status, refused in text) == (2, True)
    server.hang_up()
    wait_until(lambda: "SIGHUP: nothing has changed, because the configuration is wrong:" in server.log)
    assert refused in server.log
    assert "Traceback" not in server.log
    server.write(log='[log]\nlevel = "debug"\n')
    server.hang_up()
    wait_until(lambda: 'configuration: log.level = "debug", was "info"' in server.log)
    assert server.status()["l1"]["capacity_bytes"] == 16 << 20


def test_sigusr1_writes_the_stacks_and_the_server_goes_on(server: FileServer) -> None:
    os.kill(server.pid, signal.SIGUSR1)
    wait_until(lambda: "serve_forever" in server.log and "most recent call first" in server.log)
    assert server.status()["server"]["pid"] == server.pid
