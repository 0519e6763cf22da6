"""What docs/plugins tells the authors of eviction policies, hashers and codecs works as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvframework.api import hookspecs
from tests.plugins.fake_distributions import install
from tests.plugins.test_hook_examples import example

PLUGINS = Path(__file__).resolve().parents[2] / "docs" / "plugins"
GUIDES: dict[str, Callable[[], object]] = {
    "eviction.md": hookspecs.kvf_eviction_policies,
    "hashers.md": hookspecs.kvf_key_hashers,
    "codecs.md": hookspecs.kvf_codecs,
}


def blocks(guide: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (PLUGINS / guide).read_text(), re.DOTALL)


@pytest.mark.parametrize("guide", GUIDES)
def test_its_plugin_is_the_hooks_example(guide: str) -> None:
    entry_point, code = example(GUIDES[guide])
    assert blocks(guide, "python")[0].strip() == code.strip()
    (package,) = blocks(guide, "toml")
    assert f'"{entry_point}" = "{saved_as(guide)[0]}"' in package


@pytest.mark.parametrize("guide", GUIDES)
def test_its_plugin_package_and_proof_work_together(guide: str, tmp_path: Path) -> None:
    plugin, proof = blocks(guide, "python")
    (package,) = blocks(guide, "toml")
    module, test = saved_as(guide)
    entry_points = dict(re.findall(r'^"([\w.]+)" = "(\w+)"$', package, re.MULTILINE))
    install(tmp_path, "guide", entry_points, {module: plugin})
    (tmp_path / f"{test}.py").write_text(proof)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "--strict-markers"]
    done = subprocess.run(
        [*command, "--rootdir", ".", "-c", os.devnull],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert re.search(r"^\d\d passed in", done.stdout, re.MULTILINE), done.stdout


def saved_as(guide: str) -> list[str]:
    """The names of the modules that it says to save."""
    return re.findall(r"[Ss]ave (?:it|this) as `(\w+)\.py`", (PLUGINS / guide).read_text())
