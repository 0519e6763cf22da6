"""Distributions as users get them: built as wheels by their own backend, and installed by pip. No network."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.support.processes import ran

# One process builds all of them: starting Python takes longer than building such a wheel.
_BUILD = """
import os, sys
from hatchling.build import build_wheel
for project in sys.argv[2:]:
    os.chdir(project)
    build_wheel(sys.argv[1])
"""


def install_wheels(projects: Iterable[Path], site: Path) -> None:
    """Build a wheel of each project, and install them into `site`, a folder for PYTHONPATH."""
    wheels = site.with_name(f"{site.name}-wheels")
    wheels.mkdir()
    _run("-c", _BUILD, str(wheels), *map(str, projects))
    built = [str(wheel) for wheel in wheels.glob("*.whl")]
    _run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), *built)


def environment_with(site: Path) -> dict[str, str]:
    """Return the variables by which a process finds the packages in `site`, beside those of this process."""
    found = filter(None, [str(site), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found), "PYTEST_ADDOPTS": ""}


def run_own_tests(
    project: Path, site: Path, *arguments: str, timeout_s: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Run a project's tests, with its own settings, on the installed packages. The folder itself is not on the path of
    modules, as it were with `python -m pytest`."""
    pytest = Path(sys.executable).with_name("pytest")
    return ran(
        *(str(pytest), "-p", "no:cacheprovider", *arguments),
        code=None,
        cwd=project,
        env=environment_with(site),
        timeout=timeout_s,
    )


def _run(*arguments: str) -> None:
    ran(sys.executable, *arguments)
