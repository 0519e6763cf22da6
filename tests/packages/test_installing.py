"""Every file of requirements/, and a folder of wheels, install from a copy of the clone into a fresh environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvframework import __version__

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(file.stem for file in (ROOT / "requirements").glob("*.txt") if file.stem != "development")
SOURCES = ("kvframework", "plugins", "benchmarks", "requirements", "examples")

pytestmark = [pytest.mark.timeout(1200), pytest.mark.skipif(not FILES, reason="no checkout")]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    unbuilt = shutil.ignore_patterns("__pycache__", "*.so", "build", "dist", "*.egg-info")
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, ignore=unbuilt)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


class Environment:
    """A fresh environment, without this one's packages."""

    def __init__(self, folder: Path) -> None:
        self.python = folder / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)

    def pip(self, *arguments: str, cwd: Path) -> None:
        command = [str(self.python), "-m", "pip", "install", "--quiet", *arguments]
        environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_CONSTRAINT")}
        done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stderr[-3000:]

    def run(self, *arguments: str) -> str:
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [str(self.python), "-m", "kvframework", *arguments],
            cwd=self.python.parent,
            env=environ,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def usable(environment: Environment) -> dict[str, str]:
    """The plugins that can be used there, each with its distribution."""
    rows = json.loads(environment.run("plugins", "list", "--json"))
    return {row["name"]: row["distribution"] for row in rows if row["status"] == "available"}


@pytest.mark.parametrize("name", FILES)
def test_what_is_installed_together_can_be_used(name: str, clone: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment")
    environment.pip("--constraint", "constraints.txt", "-r", f"requirements/{name}.txt", cwd=clone)
    plugins = usable(environment)
    assert plugins["memory.pinned"] == "kvframework"
    if name not in ("demo", "authors", "bench", "control", "route"):
        assert plugins["tier.redis"] == "kvframework-redis"
    help_ = environment.run("--help")
    missing = "Not installed: kvframework-demo" in help_
    assert missing == (name not in ("all", "bench", "demo"))


def test_a_folder_of_wheels_is_enough(clone: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(wheels)]
    subprocess.run([*pip, "-r", "requirements/server.txt"], cwd=clone, check=True, timeout=900)
    environment = Environment(tmp_path / "environment")
    environment.pip("--no-index", "--find-links", str(wheels), f"kvframework-redis=={__version__}", cwd=tmp_path)
    assert usable(environment)["tier.redis"] == "kvframework-redis"
    assert "tier.peers" not in usable(environment)
