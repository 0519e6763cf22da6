"""Lets tox find the interpreters of pyenv without hand work: their folders are put at the end of PATH."""

from __future__ import annotations

import os
from pathlib import Path

versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
if versions.is_dir():
    found = sorted(str(each / "bin") for each in versions.glob("3.1[0-9]*") if (each / "bin").is_dir())
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), *found])
