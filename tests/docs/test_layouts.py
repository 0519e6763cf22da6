"""What docs/plugins/layouts.md ("layouts.md") tells the author of a layout works as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvframework.config import load_config
from kvframework.plugins import PluginRegistry, check_config
from tests.plugins.fake_distributions import install

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "plugins" / "layouts.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def test_its_layout_package_and_toml_fit_together(site: Path, tmp_path: Path) -> None:
    package, toml = blocks("toml")
    entry_points = dict(re.findall(r'^"([\w.]+)" = "(\w+)"$', package, re.MULTILINE))
    install(site, "kvf-pair", entry_points, {"kvf_pair": blocks("python")[0]})
    (tmp_path / "kvf.toml").write_text(toml)
    check_config(load_config(tmp_path / "kvf.toml"), PluginRegistry())


@pytest.mark.torch
def test_its_layout_passes_its_proof(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    layout, proof = blocks("python")
    (tmp_path / "kvf_pair.py").write_text(layout)
    (tmp_path / "test_pair.py").write_text(proof)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "--rootdir", "."]
    done = subprocess.run(
        [*command, "-c", os.devnull, "--strict-markers"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert re.search(r"^1\d passed", done.stdout, re.MULTILINE), done.stdout
