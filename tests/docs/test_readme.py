"""The README's commands and TOML are what the project runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvframework.config import load_config
from kvframework.errors import PluginUnavailable
from kvframework.registry import KINDS, PluginRegistry, check_config
from tests.docs.shown import blocks, entry_points

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_ci_runs_the_readmes_test_command() -> None:
    command = next(block for block in blocks(README, "bash") if "tox run" in block).strip()
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_first_command_installs_and_runs_the_demo() -> None:
    assert blocks(README, "bash")[0].strip().endswith(".venv/bin/kvframework demo")


@pytest.mark.parametrize("toml", blocks(README, "toml"))
def test_every_toml_is_accepted(toml: str, tmp_path: Path) -> None:
    file = tmp_path / "kvf.toml"
    file.write_text(toml)
    config = load_config(file)
    try:
        check_config(config, PluginRegistry())
    except PluginUnavailable as error:
        assert "cuda_ipc" in {each.use for each in config.transport}
        assert re.search("cuda-bindings|libcuda", error.fact), error  # noqa: PT017


def test_every_kind_of_plugin_is_listed() -> None:
    for name, kind in KINDS.items():
        assert re.search(rf"^\| \[`{name}`\]\(docs/plugins/\w+\.md\) \| `{kind.hook}` \|", README, re.MULTILINE)


def test_python_blocks_compile() -> None:
    for code in blocks(README, "python"):
        compile(code, "README.md", "exec")


def test_every_plugin_has_a_readme_that_names_its_entry_points() -> None:
    modules = entry_points((ROOT / "pyproject.toml").read_text())
    assert len(modules) >= 7
    for name, module in modules.items():
        assert name in (ROOT / "plugins" / module / "README.md").read_text(), (name, module)
