"""How `kvframework serve` begins: the quick reading of its options, a capacity of L1 that nobody names, and how its
threads share the interpreter."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from kvframework.cli.commands import app
from kvframework.cli.serving import LEAST_L1, ServeOptions, plain_options, with_capacity
from kvframework.errors import ArenaError
from kvframework.wire import messages as m
from tests.core.cli.command import environment
from tests.support.held_server import HeldServer
from tests.support.processes import ran
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

USUAL = [
    [],
    ["--takeover"],
    ["--config", "kvf.toml", "--log-format", "json"],
    ["--config=kvf.toml", "--config", "a=b.toml", "--takeover"],
    ["--set", "l1.capacity=8GiB", "--set=l2.0.use=redis", "--log-level", "debug", "--log-level=warning"],
]
UNUSUAL = [
    ["--help"],
    ["--log-level", "loud"],
    ["--log-format"],
    ["--takeover=yes"],
    ["--set", "--takeover"],
    ["--", "x"],
    ["--config="],
    ["more"],
    ["--conf", "kvf.toml"],
]
WORDS = ["--config", "--set", "--log-level", "--log-format", "--takeover", "--help", "--", "--config=x", "--set=a=b"]
WORDS += ["--log-level=info", "--log-format=json", "--set=", "a.b=c", "info", "json", "serve", "", "-", "-x", "x=", "="]
WORDS += ["é\udc80"]


def whole(arguments: Sequence[str]) -> ServeOptions:
    """What typer reads, in the types that it hands on: some of its releases convert only then."""
    command: Any = typer.main.get_command(app)
    parent = command.make_context("kvframework", ["serve"], obj={})
    read = command.get_command(parent, "serve").make_context("serve", list(arguments), parent=parent).params
    config = Path(read["config"]) if read["config"] else None
    log = {name: read[f"log_{name}"] for name in ("level", "format") if read[f"log_{name}"]}
    return ServeOptions(config, list(read["overrides"] or []), log, read["takeover"])


@pytest.mark.parametrize("arguments", USUAL)
def test_usual_options_are_read_quickly(arguments: list[str]) -> None:
    assert plain_options(["serve", *arguments]) == whole(arguments)


@pytest.mark.parametrize("arguments", UNUSUAL)
def test_others_are_left_to_the_command_line(arguments: list[str]) -> None:
    assert plain_options(["serve", *arguments]) is None


@pytest.mark.parametrize("arguments", [[], ["status"], ["--debug", "serve"], ["hold", "--", "--takeover"]])
def test_other_commands_are_left_to_the_command_line(arguments: list[str]) -> None:
    assert plain_options(arguments) is None


@given(st.lists(st.sampled_from(WORDS), max_size=6))
def test_what_is_read_quickly_is_what_the_command_line_reads(arguments: list[str]) -> None:
    quick = plain_options(["serve", *arguments])
    assert quick is None or quick == whole(arguments)


SERVE = """
import os, sys
import kvframework.server
def made(*_):
    heavy = {'typer', 'click', 'pydantic', 'rich', 'numpy', 'torch', 'kvframework.cli.commands'}
    os.write(1, f"{heavy & set(sys.modules)}".encode())  # what is printed is logged
    os._exit(0)
kvframework.server.Server = made
from kvframework.cli.main import main
main()
"""


def test_a_server_starts_without_the_imports_of_a_command_line() -> None:
    """They are most of the time from `kill -9` to the next answer."""
    done = ran(
        sys.executable,
        "-c",
        SERVE,
        "serve",
        "--set",
        "l1.capacity=1MiB",
        "--log-level",
        "error",
        code=None,
        env=environment(KVFRAMEWORK_ENDPOINT=""),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "set()", "")


MIB = 1 << 20
PROGRAM = """
import kvframework.api.memory as memory
memory.available_memory = lambda: int(open({file!r}).read()) << 20
from kvframework.cli.main import main
main()
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    file = tmp_path / "available"
    file.write_text("513")
    return file


def program(machine: Path) -> tuple[str, str]:
    return "-c", PROGRAM.format(file=str(machine))


def capacity(server: ServerProcess) -> int:
    return int(server.status()["l1"]["capacity_bytes"])


def test_l1_is_a_quarter_of_the_available_memory_and_a_line_says_so(machine: Path) -> None:
    with ServerProcess(capacity="", program=program(machine)) as server:
        assert capacity(server) == 128 * MIB
        assert "L1 has 128.0 MiB: 25% of the 513.0 MiB of available memory" in server.log


def test_a_takeover_keeps_it(machine: Path) -> None:
    with ServerProcess(capacity="", program=program(machine)) as server:
        machine.write_text("300")
        assert server.take_over() == 0
        assert capacity(server) == 128 * MIB
        assert "L1 has 128.0 MiB: the size of the kept L1" in server.log


def test_a_server_that_is_killed_goes_on_with_what_its_keeper_has(machine: Path) -> None:
    with HeldServer(capacity="", program=program(machine)) as server:
        machine.write_text("2000")
        server.kill9()
        server.start()
        assert capacity(server) == 128 * MIB
        assert server.recovered()["why_cold"] == ""


@pytest.mark.parametrize("named", ["l1.capacity=1MiB", "l1.use=other", " l1.capacity = 1MiB"])
def test_what_is_named_stays(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFRAMEWORK_CONFIG", raising=False)
    options = ServeOptions(None, (named,), {}, False)
    assert with_capacity(options, None) is options
    in_file = ServeOptions(Path("kvf.toml"), (), {}, False)
    assert with_capacity(in_file, None) is in_file
    monkeypatch.setenv("KVFRAMEWORK_CONFIG", "kvf.toml")
    by_variable = ServeOptions(None, (), {}, False)
    assert with_capacity(by_variable, None) is by_variable


def test_too_little_memory_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFRAMEWORK_CONFIG", raising=False)
    monkeypatch.setattr("kvframework.api.memory.available_memory", lambda: 4 * LEAST_L1 - 1)
    with pytest.raises(ArenaError, match=r"L1 would get 62\.0 MiB") as refused:
        with_capacity(ServeOptions(None, (), {}, False), None)
    assert "64.0 MiB or more" in refused.value.available


def test_a_configuration_from_a_pipe_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "kvf.toml"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=('[l1]\nuse = "pinned"\ncapacity = "1MiB"\n',))
    writer.start()
    monkeypatch.setenv("KVFRAMEWORK_CONFIG", str(pipe))
    with ServerProcess(capacity="") as server:
        writer.join()
        assert capacity(server) == MIB


WATCHED = """
import sys, threading, time
def watch():
    while True:
        with open({file!r}, "w") as file:
            file.write(str(sys.getswitchinterval()))
        time.sleep(0.1)
threading.Thread(target=watch, daemon=True).start()
from kvframework.cli.main import main
sys.argv[0] = "kvframework"
main()
"""


def test_a_server_does_not_wait_for_the_interpreter_as_long_as_by_default(tmp_path: Path) -> None:
    """At Python's 5 ms, four threads that make DUMPs hold up a LOOKUP for 12 to 14 ms (median)."""
    file = tmp_path / "interval"
    with ServerProcess(program=("-c", WATCHED.format(file=str(file)))) as server, server.client() as client:
        client.call("PING", m.Ping())
        wait_until(lambda: float(file.read_text() or 1) <= 0.0005, 20, "a short interval")
