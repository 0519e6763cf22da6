"""What the command says of its release and its commit, and that pip takes this release where first-party code wants
one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import kvframework
import kvframework_bench
from kvframework import __version__
from tests.core.cli.command import run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]
# As git of another program, such as a hook, would be told.
ELSEWHERE = {"GIT_DIR": "/nowhere", "GIT_WORK_TREE": "/nowhere"}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository of its own with the package, and one commit."""
    folder = tmp_path / "clone"
    others = shutil.ignore_patterns("__pycache__", "commit.txt")
    shutil.copytree(Path(kvframework.__file__).parent, folder / "kvframework", ignore=others)
    git(folder, "init", "--quiet")
    git(folder, "add", "kvframework")
    git(folder, "commit", "--quiet", "--message", "One")
    return folder


def git(folder: Path, *arguments: str) -> str:
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    who = ("-c", "user.name=one", "-c", "user.email=one@example.org", "-c", "core.hooksPath=/dev/null")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def version_of(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kvframework", "--version"],
        cwd=folder,
        env=os.environ | ELSEWHERE | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return done.stdout


def test_a_clone_says_its_commit_and_whether_its_files_are_those(clone: Path) -> None:
    commit = git(clone, "rev-parse", "--short=7", "HEAD")
    assert version_of(clone) == f"kvframework {__version__} ({commit})\n"
    with (clone / "kvframework" / "__main__.py").open("a") as file:
        file.write("# changed\n")
    assert version_of(clone) == f"kvframework {__version__} ({commit}-dirty)\n"


def test_what_is_no_clone_says_the_commit_of_its_build_or_none(clone: Path) -> None:
    shutil.rmtree(clone / ".git")
    assert version_of(clone) == f"kvframework {__version__}\n"
    (clone / "kvframework" / "commit.txt").write_text("a1b2c3d\n")
    assert version_of(clone) == f"kvframework {__version__} (a1b2c3d)\n"


@pytest.mark.skipif(not (ROOT / "hatch_build.py").exists(), reason="no checkout")
def test_a_build_in_a_clone_writes_its_commit(clone: Path) -> None:
    pytest.importorskip("hatchling")
    for name in ("hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    text = (ROOT / "pyproject.toml").read_text()
    (clone / "pyproject.toml").write_text(re.sub(r'^ +"plugins/defaults/kvf_\w+",\n', "", text, flags=re.MULTILINE))
    (clone / "plugins" / "defaults").mkdir(parents=True)
    build = (
        "import sys; from hatchling.build import build_sdist, build_wheel; "
        "print({'wheel': build_wheel, 'sdist': build_sdist}[sys.argv[1]](sys.argv[2]))"
    )

    def built(kind: str, folder: Path) -> Path:
        done = subprocess.run(
            [sys.executable, "-c", build, kind, str(clone.parent)],
            cwd=folder,
            env=os.environ | {"KVFRAMEWORK_NATIVE": "0"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return clone.parent / done.stdout.split()[-1]

    commit = git(clone, "rev-parse", "--short=7", "HEAD")
    for kind in ("wheel", "sdist"):
        into = clone.parent / kind
        shutil.unpack_archive(built(kind, clone), into, "zip" if kind == "wheel" else "gztar")
        (found,) = into.rglob("commit.txt")
        assert found.read_text() == f"{commit}\n"
    (unpacked,) = (clone.parent / "sdist").iterdir()
    again = clone.parent / "again"
    shutil.unpack_archive(built("wheel", unpacked), again, "zip")
    assert (again / "kvframework" / "commit.txt").read_text() == f"{commit}\n"


def test_the_command_says_its_release() -> None:
    done = run("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(rf"kvframework {re.escape(__version__)}( \([0-9a-f]{{7,}}(-dirty)?\))?\n", done.stdout)


def test_the_benchmarks_have_the_release_of_the_core() -> None:
    assert kvframework_bench.__version__ == __version__


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
