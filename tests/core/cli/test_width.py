"""What a terminal of 80 columns shows: no line is longer, nothing is cut off."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.core.cli.command import install_config_plugins, run
from tests.core.registry.fake_distributions import install
from tests.support.whole_cli import whole_cli

WIDTH = 80


def on_a_terminal(*arguments: str, site: Path | None = None) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    done = run(*arguments, site=site, FORCE_COLOR="1", TERM="xterm", COLUMNS=str(WIDTH))
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    return done, [line.rstrip() for line in text.splitlines()]


def commands(command: object, *names: str) -> list[tuple[str, ...]]:
    found = [names]
    for name, each in getattr(command, "commands", {}).items():
        found += commands(each, *names, name)
    return found


@pytest.mark.parametrize("names", commands(whole_cli()), ids=" ".join)
def test_help(names: tuple[str, ...]) -> None:
    done, lines = on_a_terminal(*names, "--help")
    assert done.returncode == 0
    assert [line for line in lines if len(line) > WIDTH] == []


@pytest.mark.parametrize(
    "command",
    [
        "plugins list",
        "plugins info tier.redis",
        "plugins info layout.paged",
        "plugins check tier.redis",
        "config check",
    ],
)
def test_views(command: str) -> None:
    _, lines = on_a_terminal(*command.split())
    assert [line for line in lines if len(line) > WIDTH] == []
    assert "…" not in "".join(lines)


def test_a_reason_of_a_plugin_is_read_as_a_sentence(site: Path) -> None:
    reason = "there is no driver of Acme here, libacme.so.1 cannot be loaded; install one, or give the container a card"
    install(site, "acme", {"codec.bad": "acme_bad"}, {"acme_bad": f"raise OSError({reason!r})"})
    _, lines = on_a_terminal("plugins", "list", site=site)
    assert max(map(len, lines)) <= WIDTH
    assert lines[0].split() == ["NAME", "DISTRIBUTION", "VERSION", "STATUS"]
    start = next(index for index, line in enumerate(lines) if line.startswith("codec.bad: "))
    assert reason in " ".join(lines[start:])


def test_a_long_value_has_its_origin_above(site: Path, tmp_path: Path) -> None:
    install_config_plugins(site)
    file = tmp_path / "kvf.toml"
    file.write_text(f'[[l2]]\nuse = "store"\nurl = "store://{"a" * 50}"\n')
    _, lines = on_a_terminal("config", "show", "--config", str(file), site=site)
    at = lines.index(f'url = "store://{"a" * 50}"')
    assert lines[at - 1] == f"# {file}: [[l2]] #1"
    shown = [line for line in lines if len(line) > WIDTH and str(tmp_path) not in line]
    assert shown == []
    in_a_pipe = run("config", "show", "--config", str(file), site=site).stdout
    assert f'url = "store://{"a" * 50}"  # {file}: [[l2]] #1' in in_a_pipe
