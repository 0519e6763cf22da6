"""Every `kvframework` command line on a page is one: its commands and options are parsed by the real CLI, and not run.
Every TOML block passes the configuration's check."""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from kvframework.config.load import load_config
from kvframework.errors import KVFrameworkError, PluginNotFound, PluginUnavailable
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import complete_config
from tests.docs.prose import PAGES, ROOT
from tests.docs.shown import blocks
from tests.support.whole_cli import whole_cli

CHECKED = [page for page in PAGES if page.suffix == ".md" and page.name != "CHANGELOG.md"]
CODE = re.compile(
    r"^ *```(?:bash|sh|console|text)\n(.*?)^ *```|(?<!`)`(kvframework [^`]+)`(?!`)", re.MULTILINE | re.DOTALL
)
COMMAND = re.compile(r"^\s*(?:[A-Z_]+=\S+ +)*(?:\S*/)?kvframework\s+(.+)$")
BENCH = "kvframework_bench.command"
# typer has no public name for it.
USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
# Words of a sentence that stand for any argument.
PLACEHOLDERS = ("…", "COMMAND", "KIND.NAME", "...")


def lines(text: str) -> Iterator[str]:
    """The command lines of a page, without comments, what comes after a pipe, and what runs in the background."""
    for block, inline in CODE.findall(text):
        for line in (block or inline.replace("\n", " ")).replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|;|\||(?<!&)&(?!&)|\s#\s", line):
                if found := COMMAND.match(part.strip().lstrip("$ ")):
                    yield found[1].strip()
                if re.search(r"\s#\s", line):
                    break


@functools.cache
def cli(with_bench: bool) -> Any:
    return whole_cli(without=() if with_bench else ("bench",))


def refused(line: str) -> str:
    """Why the CLI would not take a line; "" if it does. Nothing of the command itself runs."""
    words = shlex.split(line)
    command = cli(words[0] == "bench")
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        name = words.pop(0)
        if name not in command.commands:
            return f"no command {name!r}"
        command = command.commands[name]
    if "--" in words:  # what follows are options of `serve`, or an engine's command
        at = words.index("--")
        if command.name != "run" and (why := refused(shlex.join(["serve", *words[at + 1 :]]))):
            return why
        words = words[:at]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    wrong = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known | {"--help"}]
    if wrong:
        return f"no option {wrong[0]}"
    if not words or "--help" in words or hasattr(command, "commands"):
        return ""  # a group, or a command as it is spoken of
    try:
        command.make_context(command.name, [*words])  # which it empties
    except USAGE_ERROR as error:
        if type(error).__name__ != "MissingParameter":
            return error.format_message()
        surplus = command.make_context(command.name, words, resilient_parsing=True).args
        return f"{error.format_message()} And nothing takes {surplus[0]!r}" if surplus else ""
    return ""


def is_checkable(line: str) -> bool:
    if line.startswith("bench") and importlib.util.find_spec(BENCH.partition(".")[0]) is None:
        return False
    return not any(word in line for word in PLACEHOLDERS)


@pytest.mark.parametrize("page", CHECKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_command_lines_are_taken(page: Path) -> None:
    found = {line: refused(line) for line in lines(page.read_text()) if is_checkable(line)}
    assert {line: why for line, why in found.items() if why} == {}


def test_wrong_lines_are_found() -> None:
    page = "```bash\nX=1 kvframework serv\nkvframework status --chek && ls\n```\n`kvframework plugins lst`\n"
    assert [refused(line) for line in lines(page)] == ["no command 'serv'", "no option --chek", "no command 'lst'"]
    right = "`kvframework status --check` `kvframework plugins info tier.redis` `kvframework new tier mystore`"
    assert [refused(line) for line in lines(right)] == ["", "", ""]
    assert "nothing takes 'monday.jsonl'" in refused("trace record monday.jsonl")
    assert len([line for page in CHECKED for line in lines(page.read_text())]) > 100


@pytest.mark.parametrize(
    ("page", "toml"),
    [
        *(
            pytest.param(page, toml, id=f"{page.relative_to(ROOT)}-{number}")
            for page in CHECKED
            for number, toml in enumerate(blocks(page.read_text(), "toml"))
            if "[project" not in toml and "[build-system]" not in toml
        ),
        *(pytest.param(file, file.read_text(), id=file.name) for file in sorted(ROOT.glob("examples/fleet/*.toml"))),
    ],
)
def test_its_toml_is_accepted(page: Path, toml: str, tmp_path: Path) -> None:
    file = tmp_path / "kvf.toml"
    file.write_text(toml)
    try:
        complete_config(load_config(file, environ={}), PluginRegistry())
    except (PluginUnavailable, PluginNotFound):
        # Of a driver that is not here, or of an example that is not installed: its own tests check it.
        return
    except KVFrameworkError as error:
        pytest.fail(f"{page.relative_to(ROOT)}: {error}")


def test_python_of_engines_compiles() -> None:
    for page in (ROOT / "docs" / "engines").glob("*.md"):
        for code in blocks(page.read_text(), "python"):
            compile(code, page.name, "exec")
