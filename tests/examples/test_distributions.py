"""The example distributions work as their users get them: built as wheels, installed by pip, proven by their own tests.

The package is taken away from the copy of each once its wheel is built, so only what was installed can be
tested.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from kvf_dev.scaffold import PluginNames, render
from tests.support.wheels import install_wheels, run_own_tests

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Each with how many of its tests must have passed at least.
PROVEN = {"kvf-llamacpp": 150, "kvf-s3fifo": 10, "kvf-sqlite": 108, "kvf-tensorrt-llm": 9}
TORCH = {"kvf-llamacpp", "kvf-tensorrt-llm"}
# By other tests: docs/, beside the guide that is made of it, engines/, where its engine is there, and the environments
# `nixl` and `opencl` of tox.ini, where NIXL and an OpenCL platform are.
ELSEWHERE = {"kvf-simdev", "kvf-mlx", "kvf-nixl", "kvf-opencl"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the copies, and of `site`."""
    folder = tmp_path_factory.mktemp("examples")
    for name in PROVEN:
        shutil.copytree(EXAMPLES / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    install_wheels([folder / name for name in PROVEN], folder / "site")
    for name in PROVEN:
        package = folder / name / name.replace("-", "_")
        shutil.rmtree(package) if package.is_dir() else package.with_suffix(".py").unlink()
    return folder


def test_every_example_is_proven_somewhere() -> None:
    assert {project.parent.name for project in EXAMPLES.glob("*/pyproject.toml")} == {*PROVEN, *ELSEWHERE}


def test_what_the_scaffold_writes_needs_no_change_for_another_device() -> None:
    written = render(PluginNames("transport", "opencl", "async"))
    for file in ("kvf_opencl/copies.py", "kvf_opencl/context.py"):
        assert (EXAMPLES / "kvf-opencl" / file).read_text() == written[file]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.torch] * (name in TORCH)) for name in PROVEN])
def test_it_passes_its_own_tests_on_its_wheel(installed: Path, name: str) -> None:
    done = run_own_tests(installed / name, installed / "site", "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) >= PROVEN[name]
