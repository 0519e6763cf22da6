"""Extraction of the examples that a page shows, and runs of them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from tests.support.processes import ran


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page's text in that language."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def entry_points(package: str) -> dict[str, str]:
    """Return the entry points of a `pyproject.toml`, for top-level modules."""
    return dict(re.findall(r'^"([\w.]+)" = "(\w+)"$', package, re.MULTILINE))


def prove(folder: Path) -> int:
    """Run pytest with only the files of that folder; return the number of passed tests. Blocks up to 100 s."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "--strict-markers"]
    done = ran(
        *(*command, "--rootdir", ".", "-c", os.devnull),
        code=None,
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")},
    )
    passed = re.search(r"^(\d+) passed\b", done.stdout, re.MULTILINE)
    assert done.returncode == 0, done.stdout
    assert passed, done.stdout
    return int(passed[1])
