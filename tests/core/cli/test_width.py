"""What a terminal of 80 columns shows: no line is longer, nothing is cut off."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.core.cli.command import run
from tests.core.registry.fake_distributions import install

WIDTH = 80


def on_a_terminal(*arguments: str, site: Path | None = None) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    done = run(*arguments, site=site, FORCE_COLOR="1", TERM="xterm", COLUMNS=str(WIDTH))
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    return done, [line.rstrip() for line in text.splitlines()]


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
