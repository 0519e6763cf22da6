"""`kvframework config show`: every value in force, where it came from, and no secret. `kvframework config apply` and
SIGHUP at a server process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvframework.cli.serving import LEAST_L1
from kvframework.config.schema import Config
from tests.core.cli.command import install_config_plugins, run, run_process
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SECRET = "hunter2"
TOML = f"""
[server]
chunk_size = 512

[log]
format = "json"

[l1]
use = "memory"

[[transport]]
use = "cpu_gather"

[[l2]]
use = "store"
url = "store://me:{SECRET}@host/0?key={SECRET}"
token = "{SECRET}"
pin = "{SECRET}"
mirrors = ["store://you:{SECRET}@mirror", "plain"]
timeout_s = 5
"""


@pytest.fixture
def toml(site: Path, tmp_path: Path) -> Path:
    install_config_plugins(site)
    path = tmp_path / "kvf.toml"
    path.write_text(TOML)
    return path


def document(
    done: subprocess.CompletedProcess[str],
) -> tuple[dict[str, Any], dict[tuple[str, str], tuple[object, str]]]:
    """The view's own fields, and value and origin by table and key."""
    assert done.returncode == 0, done.stderr
    view = json.loads(done.stdout)
    values = {
        (table["table"], value["key"]): (value["value"], value["origin"])
        for table in view["tables"]
        for value in table["values"]
    }
    return view, values | {("", each["key"]): (each["value"], each["origin"]) for each in view["empty"]}


def test_every_value_names_its_origin(site: Path, toml: Path) -> None:
    overrides = ["--set", "l1.size=2MiB", "--set", "l2.0.depth=3", "--set", "l2.0.timeout_s=7.5"]
    view, values = document(run("config", "show", "--json", "--config", str(toml), *overrides, site=site))
    assert (view["source"], view["by_environment"]) == (str(toml), False)
    assert values["[server]", "chunk_size"] == (512, f"{toml}: [server]")
    assert values["[server]", "workers"] == (2, "default")
    assert values["[log]", "format"] == ("json", f"{toml}: [log]")
    assert values["[log]", "level"] == ("info", "default")
    assert values["[l1]", "use"] == ("memory", f"{toml}: [l1]")
    assert values["[l1]", "size"] == (2 << 20, "--set l1.size")
    assert values["[l1]", "low_watermark"] == (0.9, "default")
    assert values["[l1.eviction]", "use"] == ("two_queues", "embedded default")
    assert values["[hasher]", "use"] == ("sha256", "embedded default")
    assert values["[[transport]] #1", "use"] == ("cpu_gather", f"{toml}: [[transport]] #1")
    assert values["[[layout]] #1", "use"] == ("paged", "embedded default")
    assert values["[[l2]] #1", "depth"] == (3, "--set l2.0.depth")
    assert values["[[l2]] #1", "timeout_s"] == (7.5, "--set l2.0.timeout_s")
    assert values["", "requests"] == ([], "default")


def test_a_file_that_the_environment_names_says_so(site: Path, toml: Path) -> None:
    view, values = document(run("config", "show", "--json", site=site, config=str(toml)))
    assert view["by_environment"] is True
    assert values["[server]", "chunk_size"] == (512, f"{toml} (KVFRAMEWORK_CONFIG): [server]")


def test_without_a_file_the_endpoint_is_the_real_one() -> None:
    view, values = document(run("config", "show", "--json"))
    assert view["source"] == "embedded default"
    endpoint, origin = values["[server]", "endpoint"]
    assert str(endpoint).startswith("ipc:///")
    assert origin == "default"
    capacity, origin = values["[l1]", "capacity"]
    assert (capacity >= LEAST_L1, origin) == (True, "embedded default")


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_no_secret_is_shown(site: Path, toml: Path, form: list[str]) -> None:
    override = ["--set", f"l2.0.mirrors=['store://x:{SECRET}@y']"]
    for arguments in ([], override):
        done = run("config", "show", *form, "--config", str(toml), *arguments, site=site)
        assert done.returncode == 0, done.stderr
        assert SECRET not in done.stdout + done.stderr
        assert "store://***@host/0" in done.stdout
        assert "store://***@" in done.stdout
    assert '"--set l2.0.mirrors"' in done.stdout or "# --set l2.0.mirrors" in done.stdout


def test_a_secret_in_a_bad_override_is_not_shown() -> None:
    done = run("config", "show", "--set", f"l2.9.url=redis://:{SECRET}@host")
    assert done.returncode == 2
    assert "--set l2.9.url" in done.stderr
    assert SECRET not in done.stderr


@pytest.mark.redis
def test_the_password_of_a_redis_url_is_masked() -> None:
    overrides = ["--set", "l2.0.use=redis", "--set", f"l2.0.url=rediss://me:{SECRET}@cache:6379/0?x={SECRET}"]
    done = run("config", "show", *overrides)
    assert done.returncode == 0, done.stderr
    assert 'url = "rediss://***@cache:6379/0"' in done.stdout
    assert SECRET not in done.stdout


def test_what_is_printed_is_toml_that_says_the_same(site: Path, toml: Path, tmp_path: Path) -> None:
    overrides = ["--set", "layout=[]", "--set", 'l2.0.url=a "quoted" \\ [red]\tü\x7f', "--set", "l2.0.mirrors=[]"]
    shown = run("config", "show", "--config", str(toml), *overrides, site=site)
    assert shown.returncode == 0, shown.stderr
    parsed = tomllib.loads(shown.stdout)
    assert parsed["l2"][0]["url"] == 'a "quoted" \\ [red]\tü\x7f'
    assert parsed["l1"]["size"] == 1
    assert parsed["layout"] == []
    assert parsed["l2"][0]["mode"] == "fast"
    assert "# depth = not set" in shown.stdout
    again = tmp_path / "again.toml"
    again.write_text(shown.stdout.replace('"***"', f'"{SECRET}"'))

    def values(path: Path, *arguments: str) -> dict[tuple[str, str], object]:
        _, found = document(run("config", "show", "--json", "--config", str(path), *arguments, site=site))
        return {place: value for place, (value, _) in found.items()}

    assert values(again) == values(toml, *overrides)


def test_nothing_of_the_configuration_is_left_out() -> None:
    _, values = document(run("config", "show", "--json"))
    shown = {re.sub(r"^\[+(\w+).*", r"\1", table) or key for table, key in values}
    assert set(Config.__struct_fields__) - {"source"} <= shown


def test_a_plugin_that_is_not_here_is_an_error() -> None:
    done = run("config", "show", "--set", "l2.0.use=nowhere", "--set", f"l2.0.url=x://:{SECRET}@y")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: [plugin.not_found]")
    assert SECRET not in done.stderr


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
