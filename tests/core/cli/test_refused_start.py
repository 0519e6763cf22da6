"""What `serve` refuses, `config check` and `doctor` refuse: the same code, place and text, before anything starts."""

from __future__ import annotations

import importlib
import io
import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest

from kvf_observe.keys import CLIENTS, SERVER
from kvframework.supervise.child import Ran
from tests.core.cli.command import environment, run, run_process
from tests.filesystem.folder import open_tier
from tests.support.ports import free_port
from tests.support.processes import ran
from tests.support.server_process import ServerProcess

SMALL = 'transport = []\nlayout = []\n[l1]\nuse = "pinned"\ncapacity = "{capacity}"\n[server]\n'


class Bench(NamedTuple):
    """A private directory for the case, and what ends with the test."""

    path: Path
    stack: ExitStack

    def toml(self, server: str = "", tables: str = "", capacity: str = "16MiB") -> str:
        endpoint = "" if "endpoint" in server else f'endpoint = "ipc://{self.path}/kvf.sock"\n'
        return SMALL.format(capacity=capacity) + endpoint + server + "\n" + tables

    def curve(self) -> str:
        keys = self.path / "keys"
        assert run("keys", "new", str(keys)).returncode == 0
        return (
            f'tcp = "tcp://127.0.0.1:{free_port()}"\n[server.curve]\n'
            f'secret_key = "{keys}/{SERVER}.secret"\nclients = "{keys}/{CLIENTS}"\n'
        )

    def listening(self, family: socket.AddressFamily, place: str | tuple[str, int]) -> socket.socket:
        made = self.stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        made.bind(place)
        made.listen(8)
        return made


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    tmp_path.chmod(0o700)
    with ExitStack() as stack:
        yield Bench(tmp_path, stack)


def missing_key(bench: Bench) -> str:
    curve = bench.curve()
    (bench.path / "keys" / f"{SERVER}.secret").unlink()
    return bench.toml(curve)


def open_key(bench: Bench) -> str:
    curve = bench.curve()
    (bench.path / "keys" / f"{SERVER}.secret").chmod(0o644)
    return bench.toml(curve)


def no_key(bench: Bench) -> str:
    curve = bench.curve()
    (bench.path / "keys" / f"{SERVER}.secret").write_text("hello\n")
    return bench.toml(curve)


def no_client_keys(bench: Bench) -> str:
    curve = bench.curve()
    (bench.path / "keys" / CLIENTS).rename(bench.path / "gone")
    return bench.toml(curve)


def one_folder(bench: Bench) -> str:
    tier = '[[l2]]\nuse = "filesystem"\nshared = true\npath = "{}"\n'
    return bench.toml(tables=tier.format(bench.path / "l2") + tier.format(bench.path / "other" / ".." / "l2"))


def foreign_folder(bench: Bench) -> str:
    folder = bench.path / "photos"
    folder.mkdir()
    (folder / "cat.jpg").touch()
    return bench.toml(tables=f'[[l2]]\nuse = "filesystem"\npath = "{folder}"\n')


def no_folder(bench: Bench) -> str:
    (bench.path / "file").touch()
    return bench.toml(tables=f'[[l2]]\nuse = "filesystem"\npath = "{bench.path}/file/l2"\n')


def locked_folder(bench: Bench) -> str:
    bench.stack.callback(open_tier(bench.path / "l2").close)
    return bench.toml(tables=f'[[l2]]\nuse = "filesystem"\npath = "{bench.path}/l2"\n')


def held(bench: Bench) -> str:
    bench.listening(socket.AF_UNIX, f"{bench.path}/kvf.sock")
    (bench.path / "kvf.sock.lock").write_text("4711\n")
    return bench.toml()


def open_directory(bench: Bench) -> str:
    folder = bench.path / "run"
    folder.mkdir()
    folder.chmod(0o777)
    return bench.toml(f'endpoint = "ipc://{folder}/kvf.sock"\n')


def no_socket(bench: Bench) -> str:
    (bench.path / "kvf.sock").touch()
    return bench.toml()


def taken_port(bench: Bench) -> str:
    listening = bench.listening(socket.AF_INET, ("127.0.0.1", 0))
    return bench.toml(f'insecure = true\ntcp = "tcp://127.0.0.1:{listening.getsockname()[1]}"\n')


def one_port(bench: Bench) -> str:
    address = f"tcp://127.0.0.1:{free_port()}"
    return bench.toml(f'insecure = true\nendpoint = "{address}"\ntcp = "{address}"\n')


# Texts that need nothing beside the case's directory: its `Bench.toml` has these parts.
TEXTS: dict[str, dict[str, str]] = {
    "syntax": {"server": "[server\n"},
    "value": {"server": "chunk_size = -1\n"},
    "plugin": {"tables": '[hasher]\nuse = "sha265"\n'},
    "option": {"tables": '[[l2]]\nuse = "filesystem"\npaht = "/x"\n'},
    "codec": {"tables": "[codecs.zstd]\n"},
    "redis_port": {"tables": '[[l2]]\nuse = "redis"\nurl = "redis://127.0.0.1:eighteen/0"\n'},
    "redis_scheme": {"tables": '[[l2]]\nuse = "redis"\nurl = "127.0.0.1:18379"\n'},
    "huge": {"capacity": "900TiB"},
    "long_path": {"server": f'endpoint = "ipc:///tmp/{"x" * 100}"\n'},
    "foreign_address": {"server": 'insecure = true\ntcp = "tcp://192.0.2.1:7000"\n'},
    "low_port": {"server": 'insecure = true\ntcp = "tcp://127.0.0.1:83"\n'},
}
MADE = {
    each.__name__: each
    for each in (missing_key, open_key, no_key, no_client_keys, one_folder, foreign_folder, no_folder, locked_folder)
} | {each.__name__: each for each in (held, open_directory, no_socket, taken_port, one_port)}
CASES = {
    "syntax": ("config.file", "not valid TOML, line "),
    "value": ("config.field", "expected an integer >= 0"),
    "plugin": ("plugin.not_found", "hasher 'sha265'"),
    "option": ("config.field", "unknown key 'paht'"),
    "codec": ("config.field", "codec 'zstd' is not configured"),
    "missing_key": ("config.curve_key", "cannot be read: No such file"),
    "open_key": ("config.curve_key", "other users may use the secret key:"),
    "no_key": ("config.curve_key", "no CURVE key"),
    "no_client_keys": ("config.curve_key", "the directory of client keys cannot be read"),
    "one_folder": ("config.field", "is already the store of [[l2]] #1"),
    "foreign_folder": ("config.field", "contains files that this tier did not write"),
    "locked_folder": ("config.field", f", process {os.getpid()}"),
    "no_folder": ("config.field", "Not a directory"),
    "redis_port": ("config.field", "redis-py does not understand url"),
    "redis_scheme": ("config.field", "redis-py does not understand url"),
    "huge": ("storage.arena", "does not fit into memory"),
    "held": ("config.endpoint", "another server holds this endpoint, process 4711"),
    "long_path": ("config.endpoint", "the socket path"),
    "open_directory": ("config.endpoint", "other users may write to the directory"),
    "no_socket": ("config.endpoint", "exists and is not a socket"),
    "taken_port": ("config.endpoint", "cannot listen: Address already in use"),
    "foreign_address": ("config.endpoint", "cannot listen: Cannot assign requested address"),
    "one_port": ("config.endpoint", "endpoint and tcp are the same"),
    "low_port": ("config.endpoint", "cannot listen: Permission denied"),
}
if os.geteuid() == 0:
    del CASES["low_port"]  # root may use every port

# Imports the server and its plugins once, and is it once for each file, in a child of its own.
SERVE = """
import os, signal, sys
import kvframework.cli.serve, kvframework.server
from kvframework.cli.main import main
from kvframework.config.load import load_config
from kvframework.preflight import refusals
from kvframework.registry.registry import PluginRegistry
list(refusals(load_config(None), PluginRegistry(), replaces=0))
for path in sys.argv[1:]:
    child = os.fork()
    if not child:
        signal.alarm(60)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{path}.{name}", os.O_WRONLY | os.O_CREAT), number)
        sys.argv = ["kvframework", "serve", "--config", path]
        main()
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


ONE_AT_ONCE = threading.Lock()


def run_here(module: str, request: bytes, *, deadline_s: float, function: str) -> Ran:
    """What `run_isolated` answers, without a process: what the doctor finds is the point here."""
    with (
        ONE_AT_ONCE,
        tempfile.TemporaryFile() as report,
        mock.patch.object(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(request))),
        mock.patch.object(sys, "argv", [module, str(report.fileno())]),
    ):
        getattr(importlib.import_module(module), function)()
        return Ran(os.pread(report.fileno(), 1 << 20, 0).splitlines(), "", "")


class Refused(NamedTuple):
    """A case after `serve` refused it: what lay in its directory before, and what the process said."""

    bench: Bench
    file: Path
    before: list[Path]
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Refused]]:
    """All cases: their places are held until the last test has ended."""
    with ExitStack() as stack:
        made: dict[str, tuple[Bench, Path, list[Path]]] = {}
        for case in CASES:
            path = tmp_path_factory.mktemp("case")
            path.chmod(0o700)
            bench, file = Bench(path, stack), tmp_path_factory.mktemp("toml") / "kvf.toml"
            make = MADE.get(case)
            file.write_text(make(bench) if make else bench.toml(**TEXTS[case]))
            made[case] = bench, file, sorted(path.rglob("*"))
        files = [str(file) for _, file, _ in made.values()]
        done = ran(sys.executable, "-c", SERVE, *files, env=environment())
        codes = map(int, done.stdout.split())
        yield {
            name: Refused(*each, code, *(Path(f"{each[1]}.{end}").read_text() for end in ("out", "err")))
            for (name, each), code in zip(made.items(), codes, strict=True)
        }


@pytest.mark.parametrize("case", CASES)
def test_the_three_refuse_with_the_same_text(
    case: str, refused: dict[str, Refused], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvframework.doctor.plugins.run_isolated", run_here)
    served = refused[case]
    file = served.file
    checked = run("config", "check", str(file))
    code, fact = CASES[case]
    assert (served.code, served.out) == (checked.returncode, checked.stdout) == (2, "")
    assert served.err.startswith(f"error: [{code}] ")
    assert fact in served.err
    assert without_room(checked.stderr) == without_room(served.err)
    doctor = run("doctor", "--config", str(file), "--json")
    failed = [each for each in json.loads(doctor.stdout)["findings"] if each["level"] == "fail"]
    assert (doctor.returncode, [each["id"] for each in failed]) == (1, [code])
    said = failed[0]
    assert f"[{code}] {said['where']}: {said['fact']}\n" in served.err
    expected, _, hint = said["advice"].rpartition("; hint: ")
    assert hint in served.err
    assert case == "huge" or expected in served.err, "the memory that is available changes between two commands"
    assert sorted(served.bench.path.rglob("*")) == served.before


def without_room(text: str) -> str:
    """The memory that is available now changes between two commands."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("  expected:"))


def test_every_refusal_is_named_not_only_the_first(bench: Bench) -> None:
    file = bench.path / "kvf.toml"
    file.write_text(bench.toml(tables='[hasher]\nuse = "sha265"\n[[l2]]\nuse = "filesystem"\npaht = "/x"\n'))
    done = run("config", "check", str(file))
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [
        f"error: [plugin.not_found] {file}: [hasher]: no installed distribution offers the hasher 'sha265'",
        f"error: [config.field] {file}: [[l2]] #1: unknown key 'paht'",
    ]


def test_a_server_that_runs_keeps_no_new_file_from_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, other, wrong = (tmp_path / name for name in ("kvf.toml", "other.toml", "wrong.toml"))
    address = f"tcp://127.0.0.1:{free_port()}"
    tier = f'[[l2]]\nuse = "filesystem"\npath = "{tmp_path}/l2"\n'
    text = SMALL.format(capacity="16MiB") + f'insecure = true\ntcp = "{address}"\n{tier}'
    for each in (file, other):
        each.write_text(text)
    wrong.write_text(text.replace("127.0.0.1", "192.0.2.1") + '[[l2]]\nuse = "filesystem"\npaht = "/x"\n')
    monkeypatch.setenv("KVFRAMEWORK_CONFIG", str(file))
    with ServerProcess() as server:
        at = ("--set", f"server.endpoint={server.endpoint}")
        runs = f"a server (process {server.pid}, configuration {file}) runs there; this configuration takes effect"
        for each in (file, other):
            checked = run("config", "check", str(each), *at)
            assert (checked.returncode, checked.stderr) == (0, "")
            assert f"{server.endpoint}: {runs}" in checked.stdout
        doctor = run("doctor", "--config", str(other), *at, "--json")
        findings = {each["id"]: each for each in json.loads(doctor.stdout)["findings"]}
        assert doctor.returncode == 0
        assert runs in findings["socket.server"]["fact"]
        refused = run("config", "check", str(wrong), *at)
        assert refused.returncode == 2
        assert [line.split()[1] for line in refused.stderr.splitlines() if line.startswith("error: ")] == [
            "[config.endpoint]",
            "[config.field]",
        ]
        for each in (file, other):
            held = f"another server holds this endpoint, process {server.pid}"
            assert held in run_process("serve", "--config", str(each), *at).stderr
