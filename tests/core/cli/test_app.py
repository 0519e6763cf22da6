"""The command as a whole: help, completion, and how errors and interrupts leave it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.cli.command import COMMAND, environment, run
from tests.support.processes import ran
from tests.support.waiting import wait_until

SCRIPT = Path(sys.executable).with_name("kvframework")
WITH_EXAMPLES = ["serve", "status", "config check", "config show", "plugins list", "plugins info", ""]


@pytest.mark.parametrize("command", WITH_EXAMPLES)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_has_examples_of_the_command(command: str, flag: str) -> None:
    done = run(*command.split(), flag)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().startswith("Usage: kvframework")
    _, _, examples = done.stdout.partition("Examples:")
    assert f"kvframework {command}".strip() in examples


WALK = """
import json
from tests.support.whole_cli import whole_cli
def walk(command, name):
    yield name, command.help
    for parameter in command.params:
        if not getattr(parameter, "hidden", False):
            yield f"{name} {parameter.name}", parameter.help
    for child, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, f"{name} {child}")
print(json.dumps(dict(walk(whole_cli(), "kvframework"))))
"""


def test_every_command_and_option_has_a_help_text() -> None:
    done = ran(sys.executable, "-c", WALK)
    helps = json.loads(done.stdout)
    assert {"kvframework serve", "kvframework config show", "kvframework top once"} <= set(helps)
    assert [name for name, text in helps.items() if not text] == []


def broken(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (site / "broken.py").write_text(
        "import kvframework.registry.registry as registry\n"
        "def fail(*_): raise ValueError('two\\nlines [red]')\n"
        "registry.PluginRegistry = fail\n"
        "from kvframework.cli.main import main\n"
        "main()\n"
    )
    command = [sys.executable, "-m", "broken", *arguments]
    return ran(*command, code=None, env=environment(site))


def test_an_unforeseen_error_is_one_line_and_a_hint(site: Path) -> None:
    done = broken(site, "plugins", "list")
    assert (done.returncode, done.stdout) == (1, "")
    error, hint = done.stderr.splitlines()
    assert error == "error: unforeseen ValueError: two lines [red]"
    assert "kvframework --debug" in hint


def test_debug_shows_where_it_came_from(site: Path) -> None:
    done = broken(site, "--debug", "plugins", "list")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ValueError: two" in done.stderr


def test_wrong_usage_is_status_2_without_a_traceback() -> None:
    for arguments in (["serve", "--log-level", "loud"], ["nonsense"], ["plugins", "info"]):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert "Usage: kvframework" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["plugins", "list"], ["plugins", "list", "--json"], ["config", "show"]])
def test_a_reader_that_goes_away_is_no_error(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*COMMAND, *arguments], env=environment(), stdout=writer, stderr=subprocess.PIPE, timeout=240, check=False
        )
    finally:
        os.close(writer)
    assert done.stderr == b""


@pytest.mark.parametrize("arguments", [["plugins", "check", "eviction.lru"], ["config", "check"]])
def test_a_stream_that_is_closed_is_no_error(arguments: list[str]) -> None:
    """What opens a descriptor gets its number, and what starts a process names that number."""
    command = ["bash", "-c", 'exec "$@" <&- >&-', "bash", *COMMAND, *arguments]
    done = subprocess.run(command, env=environment(), stderr=subprocess.PIPE, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(("module", "command"), [("typer", "status"), ("resource", "serve")])
def test_an_interrupt_while_modules_are_imported_is_silent(
    site: Path, tmp_path: Path, module: str, command: str
) -> None:
    marker = tmp_path / "importing"
    (site / f"{module}.py").write_text(f"import time\nopen({str(marker)!r}, 'w').close()\ntime.sleep(60)\n")
    process = subprocess.Popen([*COMMAND, command], env=environment(site), stderr=subprocess.PIPE)
    try:
        wait_until(marker.exists)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=240) == (None, b"")
        assert process.returncode == 130
    finally:
        process.kill()


def complete(*words: str) -> list[str]:
    """What bash would offer for the last of `words`."""
    done = run(_KVFRAMEWORK_COMPLETE="complete_bash", COMP_WORDS=" ".join(words), COMP_CWORD=str(len(words) - 1))
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_commands_and_choices_are_completed() -> None:
    assert complete("kvframework", "conf") == ["config"]
    assert complete("kvframework", "config", "") == ["check", "show", "apply"]
    assert complete("kvframework", "serve", "--log-format", "") == ["human", "json"]


@pytest.mark.skipif(not SCRIPT.exists() or shutil.which("bash") is None, reason="needs bash and the installed script")
def test_completion_installs_into_bash_and_works_there(tmp_path: Path) -> None:
    home = environment(HOME=str(tmp_path), PATH=f"{SCRIPT.parent}{os.pathsep}{os.environ['PATH']}")

    def bash(script: str) -> str:
        command = ["bash", "--norc", "-c", script]
        done = ran(*command, env=home)
        return done.stdout

    # `;` keeps bash from being replaced by the command, which looks for it among its parents.
    assert "complete -o default" in bash("kvframework --show-completion; exit $?")
    bash("kvframework --install-completion; exit $?")
    words = "COMP_WORDS=(kvframework plugins in); COMP_CWORD=2"
    offered = bash(f'source ~/.bashrc; {words}; _kvframework_completion kvframework; echo "${{COMPREPLY[@]}}"')
    assert "info" in offered.split()
