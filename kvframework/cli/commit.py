"""The commit of the sources, for `kvframework --version`. The build reads this file by its path, so it imports nothing
of the package."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

# In a wheel and an sdist, beside the package's modules: the build writes it.
FILE = "commit.txt"
_ASK = ("git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*")


def present_commit() -> str:
    """Return the commit of the package that runs, "" if nothing tells it. Blocking: in a clone it asks git."""
    package = Path(__file__).parents[1]
    found = commit_of(package.parent)
    if found:
        return found
    try:
        return (package / FILE).read_text().strip()
    except OSError:
        return ""


def commit_of(root: Path) -> str:
    """Return the commit of a clone, with `-dirty` where its files differ from it; "" for any other folder."""
    if not (root / ".git").exists():
        return ""
    # Variables of git would name another repository, and a lock would stop somebody's commit.
    mine = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment = {**mine, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        asked = subprocess.run(
            _ASK, cwd=root, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""
