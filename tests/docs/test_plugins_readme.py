"""What docs/plugins/README.md tells the author of any plugin exists: kinds, pages, commands, files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvframework.api.codec import Codec
from kvframework.api.eviction import EvictionPolicy
from kvframework.api.hasher import KeyHasher
from kvframework.api.layout import Layout
from kvframework.api.listener import Listener
from kvframework.api.memory import Memory
from kvframework.api.tier import Tier
from kvframework.registry import KINDS
from tests.core.cli.command import run
from tests.docs.hook_reference import PAGES
from tests.support.whole_cli import whole_cli

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "plugins"
PAGE = (FOLDER / "README.md").read_text()
CODE = "\n".join(re.findall(r"(?<=```bash\n).*?(?=```)|(?<=`)kvframework [^`]+(?=`)", PAGE, re.DOTALL))
COMMANDS = re.findall(r"^ *(kvframework (?!new KIND).+)$", CODE, re.MULTILINE)
NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5}
CONTRACTS = {
    "memory": Memory,
    "tier": Tier,
    "layout": Layout,
    "eviction": EvictionPolicy,
    "hasher": KeyHasher,
    "codec": Codec,
    "listener": Listener,
}


def test_every_kind_has_its_page() -> None:
    assert dict(re.findall(r"\| `(\w+)` \| \[(\w+\.md)\]\(\2\) \|", PAGE)) == PAGES
    assert set(PAGES) == set(KINDS)
    assert {file.name for file in FOLDER.glob("*.md")} == {
        *PAGES.values(),
        "README.md",
        "hooks.md",
        "compatibility.md",
        "registry.md",
    }


def test_it_counts_methods_rightly() -> None:
    told = {kind: NUMBERS[word] for kind, word in re.findall(r"\| `(\w+)` \| \S+ \| (\w+) methods? \|", PAGE)}
    assert told == {kind: len(contract.__abstractmethods__) for kind, contract in CONTRACTS.items()}


@pytest.mark.parametrize("line", dict.fromkeys(COMMANDS))
def test_every_command_takes_what_it_is_given(line: str) -> None:
    command: Any = whole_cli()
    words = shlex.split(line)[1:]
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context(line, words, resilient_parsing=False)


def test_new_writes_the_files_that_it_shows(tmp_path: Path) -> None:
    (line,) = (each for each in COMMANDS if each.startswith("kvframework new") and "NAME" not in each)
    folder = tmp_path / "kvf-mystore"
    done = run(*shlex.split(line)[1:], "--path", str(folder))
    assert done.returncode == 0, done.stderr
    (tree,) = re.findall(r"```text\nkvf-mystore/\n(.*?)```", PAGE, re.DOTALL)
    shown = re.findall(r"(?:^ {4}|  )([\w./-]+\.(?:toml|py|ini|md|yml))", tree, re.MULTILINE)
    assert len(shown) == 8
    assert [name for name in shown if not (folder / name).exists()] == []
