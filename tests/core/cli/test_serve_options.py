"""The quick reading of the options of `serve`, which is what the whole command line reads, and what it spares."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from kvframework.cli.commands import app
from kvframework.cli.serving import ServeOptions, plain_options
from tests.core.cli.command import environment
from tests.support.processes import ran

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
