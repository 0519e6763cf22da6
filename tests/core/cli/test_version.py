"""What the command says of its release, and that pip takes this release where first-party code wants one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvframework import __version__
from tests.core.cli.command import run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]


def test_the_command_says_its_release() -> None:
    done = run("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"kvframework {__version__}\n"


def test_the_benchmarks_have_the_release_of_the_core() -> None:
    bench = pytest.importorskip("kvframework_bench")
    assert bench.__version__ == __version__


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="no checkout")
def test_ranges_of_the_examples_begin_where_pip_takes_a_development_version() -> None:
    """pip refuses 0.3.0.dev0 for >=0.3."""
    begin = f">={'.'.join(__version__.split('.')[:2])}.0.dev0"
    files = sorted((ROOT / "examples").glob("*/pyproject.toml"))
    assert len(files) >= 7
    for file in files:
        needed = map(Requirement, tomllib.loads(file.read_text())["project"]["dependencies"])
        (core,) = (each for each in needed if each.name == "kvframework")
        assert str(core.specifier) == begin, file
        assert core.specifier.contains(__version__, prereleases=True), file
