"""What docs/plugins tells the authors of plugins works as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest

from kvframework.api.plugin import Finding
from kvframework.config.load import load_config
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import complete_config
from tests.core.cli.command import run
from tests.core.registry.fake_distributions import install
from tests.docs import shown

PLUGINS = Path(__file__).resolve().parents[2] / "docs" / "plugins"
# How many cases the proof of a page's example passes at least.
GUIDES = {
    "memory.md": 8,
    "tiers.md": 75,
    "eviction.md": 10,
    "hashers.md": 10,
    "codecs.md": 10,
    "listeners.md": 3,
    "layouts.md": 10,
}
OF_TORCH = {"layouts.md"}


def blocks(guide: str, language: str) -> list[str]:
    return shown.blocks((PLUGINS / guide).read_text(), language)


@pytest.mark.parametrize(
    "guide", [pytest.param(guide, marks=pytest.mark.torch if guide in OF_TORCH else ()) for guide in GUIDES]
)
def test_its_plugin_package_and_proof_work_together(guide: str, tmp_path: Path) -> None:
    if guide in OF_TORCH:
        pytest.importorskip("torch")
    plugin, proof, *_ = blocks(guide, "python")
    module, test, *_ = re.findall(r"[Ss]ave\s+(?:it|this)\s+as\s+`(\w+)\.py`", (PLUGINS / guide).read_text())
    install(tmp_path, "guide", shown.entry_points(blocks(guide, "toml")[0]), {module: plugin})
    (tmp_path / f"{test}.py").write_text(proof)
    assert shown.prove(tmp_path) >= GUIDES[guide]


# layouts


def test_the_layout_its_package_and_its_toml_fit_together(site: Path, tmp_path: Path) -> None:
    package, toml = blocks("layouts.md", "toml")
    install(site, "kvf-pair", shown.entry_points(package), {"kvf_pair": blocks("layouts.md", "python")[0]})
    (tmp_path / "kvf.toml").write_text(toml)
    complete_config(load_config(tmp_path / "kvf.toml"), PluginRegistry())


# tiers


def test_the_diagnosis_of_a_tier_gives_findings(tmp_path: Path) -> None:
    (code,) = [block for block in blocks("tiers.md", "python") if "def diagnose" in block]
    (tmp_path / "shown.py").write_text(code)
    names = run_path(str(tmp_path / "shown.py"))
    for capacity, level in ((1, "ok"), (1 << 62, "warn")):
        (found,) = names["diagnose"](SimpleNamespace(path=str(tmp_path), capacity=capacity), None, 0.0)
        assert isinstance(found, Finding)
        assert found.level == level


# from idea to package


def test_new_writes_the_files_that_the_page_shows(tmp_path: Path) -> None:
    page = (PLUGINS / "README.md").read_text()
    (line,) = set(re.findall(r"^ *(kvframework new [a-z]+ (?!NAME).+)$", page, re.MULTILINE))
    folder = tmp_path / "kvf-mystore"
    done = run(*shlex.split(line)[1:], "--path", str(folder))
    assert done.returncode == 0, done.stderr
    (tree,) = re.findall(r"```text\nkvf-mystore/\n(.*?)```", page, re.DOTALL)
    files = re.findall(r"(?:^ {4}|  )([\w./-]+\.(?:toml|py|ini|md|yml))", tree, re.MULTILINE)
    assert len(files) > 4
    assert [name for name in files if not (folder / name).exists()] == []
