"""`kvframework hold` as users run it, with a real server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvframework.keeper.sockets import CONTROL_SUFFIX
from tests.core.cli.command import COMMAND, environment, run, run_process
from tests.support.processes import children, own_bytes
from tests.support.waiting import wait_until

TIMEOUT = 120.0


@pytest.fixture
def folder() -> Iterator[Path]:
    # Socket paths are short, so not below pytest's long tmp_path.
    with tempfile.TemporaryDirectory(prefix="kvf-") as made:
        yield Path(made)


@pytest.fixture
def endpoint(folder: Path) -> str:
    return f"ipc://{folder}/s.sock"


@pytest.fixture
def keeper(folder: Path, endpoint: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [*COMMAND, "hold", "--", "--set", f"server.endpoint={endpoint}", "--set", "l1.capacity=16MiB"]
    with (folder / "log").open("wb") as log:
        started = subprocess.Popen(command, env=environment(), stdout=log, stderr=log)
    try:
        yield started
    finally:
        started.terminate()
        started.wait(TIMEOUT)


def answers(endpoint: str) -> bool:
    return run("status", "--endpoint", endpoint, "--json").returncode == 0


def test_a_server_and_its_keeper(keeper: subprocess.Popen[bytes], folder: Path, endpoint: str) -> None:
    wait_until(lambda: answers(endpoint), TIMEOUT, "the server")
    (server,) = children(keeper.pid)
    assert own_bytes(keeper.pid) < 16 << 20
    shown = run("hold", "--status", "--endpoint", endpoint)
    assert shown.returncode == 0
    assert f"server: process {server}, " in shown.stdout
    assert f"keeper: process {keeper.pid}" in shown.stdout

    os.kill(server, signal.SIGKILL)
    wait_until(lambda: children(keeper.pid) - {server}, TIMEOUT, "the next server")
    wait_until(lambda: answers(endpoint), TIMEOUT, "the next server's answer")
    status = json.loads(run("hold", "--status", "--endpoint", endpoint, "--json").stdout)
    assert status["starts"] == 2
    assert "by signal SIGKILL" in status["last_end"]
    log = (folder / "log").read_text()
    assert log.index("L1 began empty: nothing_kept") < log.index("L1 recovered 0 objects (0 B) in ")

    refused = run("hold", "--drop", "--endpoint", endpoint)
    assert refused.returncode == 1
    assert ", uses the memory; --drop --restart stops it first" in refused.stderr
    assert run("hold", "--drop", "--restart", "--endpoint", endpoint).returncode == 0

    second = run_process("hold", "--", "--set", f"server.endpoint={endpoint}")
    assert second.returncode == 2
    assert f"process {keeper.pid}, serves this endpoint; see kvframework hold --status" in second.stderr

    # Before it serves a server ends by the signal itself.
    wait_until(lambda: answers(endpoint), TIMEOUT, "the cold server's answer")
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(TIMEOUT) == 0
    gone = run("hold", "--status", "--endpoint", endpoint)
    assert gone.returncode == 2
    assert "no `kvframework hold` runs here" in gone.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--", "--set", "server.chunk_siz=1"], "did you mean 'chunk_size'?"),
        (["--", "--cofnig", "x"], "No such option"),
        (["--", "--config", "/not/there.toml"], "/not/there.toml"),
        (["--", "--set", "server.endpoint=ipc:///proc/none/s.sock"], "cannot be made"),
        (["--status", "--drop"], "needs --drop"),
        (["--restart"], "needs --drop"),
        (["--json"], "options after"),
        (["--endpoint", "ipc:///x/s.sock"], "options after"),
        (["--set", "l1.capacity=1GiB"], "kvframework hold -- --config kvf.toml"),
        (["--drop", "--set", "l1.capacity=1GiB"], "take no options"),
        (["--status", "--", "--set", "a.b=1"], "take no options"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_runs(arguments: list[str], text: str) -> None:
    # One that is not refused replaces its process.
    refused = run_process("hold", *arguments) if arguments[0] == "--" else run("hold", *arguments)
    assert refused.returncode == 2
    assert text in " ".join(refused.stderr.replace("\u2502", " ").split())


def test_a_keeper_that_does_not_answer_in_time(folder: Path, endpoint: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as silent:
        silent.bind(f"{folder}/s.sock{CONTROL_SUFFIX}")
        asked = run("hold", "--reload", "--endpoint", endpoint, "--timeout", "0.1")
    assert asked.returncode == 2
    assert "does not answer within 0.1 s" in asked.stderr
    assert "hint: the keeper may still execute" in asked.stderr


def test_the_options_of_the_server_have_their_help() -> None:
    shown = run("hold", "--", "--help")
    assert shown.returncode == 0
    assert "--log-format" in shown.stdout


def test_a_server_that_refuses_its_start_ends_the_keeper(folder: Path, endpoint: str) -> None:
    ended = run_process("hold", "--", "--set", f"server.endpoint={endpoint}", "--set", "l1.use=nothing")
    assert ended.returncode == 2
    assert "[plugin.not_found]" in ended.stderr
    assert ": the keeper ends, because a restart would fail too" in ended.stderr
    assert not (folder / "s.sock.hold").exists()
