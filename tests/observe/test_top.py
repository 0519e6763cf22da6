"""`kvframework top` on a pseudo-terminal, at a real server: restarts, signals, and every way to end it; and as text."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.cli.command import COMMAND, environment, run, run_process
from tests.support.server_process import ServerProcess, server_fixture
from tests.support.terminal import Terminal
from tests.support.wire_client import WireClient, key_for

MODELS = ("Qwen3-32B", "gpt-oss-[red]120b", ":bomb: \u4e16\u754c " * 3)
SLOW_S = 120.0
TOP = ("top", "--interval", "0.1", "--timeout", "60", "--endpoint")


server = server_fixture(scope="module")


@pytest.fixture(scope="module")
def engines(server: ServerProcess) -> Iterator[list[WireClient]]:
    """An engine for each model, which stored a chunk for each place of its model, and found it again."""
    with server.client() as first, server.client() as second, server.client() as third:
        made = [first, second, third]
        for number, (client, model) in enumerate(zip(made, MODELS, strict=True), start=1):
            registered = client.register(number, model_name=model)
            for chunk in range(number):
                tokens = range(1000 * chunk, 1000 * chunk + 256)
                key = key_for(registered, tokens, model_name=model)
                client.store(key, b"a", number)
                for _ in range(1 + chunk):
                    assert client.lookup(key).hit_tokens == 256
        yield made


def top(endpoint: str, *arguments: str, **variables: str) -> Terminal:
    return Terminal([*COMMAND, *TOP, endpoint, *arguments], environment(TERM="xterm-256color", **variables))


def test_it_goes_on_through_a_restart_of_the_server() -> None:
    with ServerProcess() as server, top(server.endpoint, "--timeout", "5") as screen:
        screen.shows(r"up \d+ (s|min)")
        server.kill9()
        picture = screen.shows(r"server silent since \d\d:\d\d:\d\d")
        assert "run.server_gone" in picture[1]
        # Engines would refuse a server that cuts otherwise; somebody who looks must not.
        server.set("server.chunk_size=512")
        server.start()
        screen.shows(r"up \d+ (s|min)  rates of \d+ s")
        screen.type("\x1a")  # a Ctrl-Z does not stop it
        screen.type("\x03")
        assert screen.ended() == 0
        assert "Traceback" not in screen.shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_and_the_terminal_is_put_back(server: ServerProcess, number: signal.Signals) -> None:
    with top(server.endpoint, NO_COLOR="1") as screen:
        screen.shows("hit rate")
        if number == signal.SIGINT:
            screen.type("\x03")
        else:
            screen.process.send_signal(number)
        assert screen.ended() == 0
        screen.wrote("\x1b[?25h\x1b[?1049l")
        assert screen.is_as_before()
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", screen.shown), "NO_COLOR"


@pytest.mark.parametrize(("ignored", "status"), [((), -signal.SIGHUP), ((signal.SIGHUP,), 0)], ids=["", "nohup"])
def test_it_ends_when_its_terminal_hangs_up(
    server: ServerProcess, ignored: tuple[signal.Signals, ...], status: int
) -> None:
    command = [*COMMAND, *TOP, server.endpoint]
    with Terminal(command, environment(TERM="xterm"), ignored=ignored) as screen:
        screen.shows("hit rate")
        screen.hang_up()
        assert screen.ended() == status


@pytest.mark.usefixtures("engines")
def test_without_a_terminal_one_picture_is_text(server: ServerProcess) -> None:
    done = run_process(*TOP, server.endpoint, "--view", "models")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert re.match(r"\d\d:\d\d:\d\d  up \d+ (s|min)  rates of \d+ s  0 problems  kvframework ", lines[0])
    assert lines[2].split()[:3] == ["model", "L1", "hit"]
    assert lines[3].startswith(MODELS[2])
    assert {line.split()[0] for line in lines[3:6]} == {":bomb:", "gpt-oss-[red]120b", "Qwen3-32B"}


def test_so_many_pictures_as_were_asked_for(server: ServerProcess) -> None:
    done = run(*TOP, server.endpoint, "--frames", "3")
    assert done.returncode == 0
    assert done.stdout.count("hit rate") == 3
    done = run_process(*TOP, server.endpoint, "--once", PYTHONIOENCODING="latin-1")
    assert "L1 ????" in done.stdout
    assert run(*TOP, server.endpoint, "--once").stdout.count("hit rate") == 1


def test_without_an_answer_the_status_is_2(tmp_path: Path) -> None:
    done = run("top", "--once", "--timeout", "0.1", "--endpoint", f"ipc://{tmp_path}/none.sock")
    assert done.returncode == 2
    assert re.search(r"server silent since \d\d:\d\d:\d\d", done.stdout)


def test_a_reader_that_ends_ends_it_quietly(server: ServerProcess) -> None:
    command = [*COMMAND, *TOP, server.endpoint, "--frames", "100000"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(SLOW_S) == 1
        assert process.stderr.read() == b""


def test_wrong_options_are_refused() -> None:
    for arguments in (["--interval", "0"], ["--frames", "0"], ["--once", "--frames", "2"], ["--view", "none"]):
        done = run("top", *arguments)
        assert done.returncode == 2
        assert arguments[0] in done.stderr
