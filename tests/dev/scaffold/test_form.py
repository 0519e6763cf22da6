"""What `kvframework new` writes is clean with its own settings: by ruff, whatever the name is, and by mypy --strict."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvf_dev.scaffold import VARIANTS, PluginNames, render, write_distribution
from kvframework.registry.discovery import KINDS

# Lines grow with the name, so the shortest and the longest that there can be.
RENDERED = [*((kind, "") for kind in KINDS), *VARIANTS]
NAMES = ["x", "a_name_that_is_as_long_as_it_can"]


@pytest.mark.parametrize("name", NAMES, ids=len)
def test_ruff_finds_nothing(name: str, tmp_path: Path) -> None:
    pytest.importorskip("ruff", reason="ruff not installed")
    for kind, variant in RENDERED:
        write_distribution(tmp_path / f"{kind}-{variant}", render(PluginNames(kind, name, variant)))
    for arguments in (["check"], ["format", "--check"]):
        run(tmp_path, "ruff", *arguments, "--no-cache", ".")


def test_mypy_finds_nothing(tmp_path: Path) -> None:
    """All kinds at once, since kvframework's own types take longest; the settings are those that say most."""
    pytest.importorskip("mypy", reason="mypy not installed")
    sources: list[Path] = []
    for kind, variant in RENDERED:
        names, project = PluginNames(kind, f"mine_{kind}{variant}", variant), tmp_path / f"{kind}-{variant}"
        write_distribution(project, render(names))
        sources.append(project / names.module)
        for test in (project / "tests").iterdir():
            stem = f"{test.stem}_{kind}{variant}" if test.stem.startswith("test_") else test.stem
            sources.append(test.rename(tmp_path / f"{stem}.py"))
    settings = ("--config-file", str(tmp_path / "layout-" / "pyproject.toml"), "--cache-dir", str(tmp_path / "cache"))
    searched = os.pathsep.join(str(source.parent) for source in sources if source.is_dir())
    run(tmp_path, "mypy", *settings, *map(str, dict.fromkeys(sources)), MYPYPATH=searched)


def run(folder: Path, *arguments: str, **variables: str) -> None:
    command, env = [sys.executable, "-m", *arguments], os.environ | variables
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
