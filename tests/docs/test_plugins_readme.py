"""What docs/plugins/README.md tells the author of any plugin exists: kinds, pages, commands, files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from kvframework.registry import KINDS
from tests.core.cli.command import run
from tests.docs.hook_reference import PAGES

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "plugins"
PAGE = (FOLDER / "README.md").read_text()
CODE = "\n".join(re.findall(r"(?<=```bash\n).*?(?=```)|(?<=`)kvframework [^`]+(?=`)", PAGE, re.DOTALL))
COMMANDS = re.findall(r"^ *(kvframework (?!new KIND).+)$", CODE, re.MULTILINE)


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


def test_new_writes_the_files_that_it_shows(tmp_path: Path) -> None:
    (line,) = (each for each in COMMANDS if each.startswith("kvframework new") and "NAME" not in each)
    folder = tmp_path / "kvf-mystore"
    done = run(*shlex.split(line)[1:], "--path", str(folder))
    assert done.returncode == 0, done.stderr
    (tree,) = re.findall(r"```text\nkvf-mystore/\n(.*?)```", PAGE, re.DOTALL)
    shown = re.findall(r"(?:^ {4}|  )([\w./-]+\.(?:toml|py|ini|md|yml))", tree, re.MULTILINE)
    assert len(shown) == 8
    assert [name for name in shown if not (folder / name).exists()] == []
