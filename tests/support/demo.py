"""`kvframework demo` as a process, and the files and processes that it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.processes import ran

COMMAND = [sys.executable, "-m", "kvframework.cli.main", "demo"]


def demo(temporary: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the demo to its end; `temporary` is the directory in which it creates its own."""
    # The model is so small that several threads only wait for each other.
    environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", **variables}
    return ran(*COMMAND, *arguments, code=None, env=environment, timeout=1100)


def left_behind(temporary: Path) -> list[str]:
    """Return files below `temporary` and processes that name it."""
    files = [str(path) for path in temporary.iterdir()]
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if str(temporary).encode() in command:
            files.append(f"{entry.name}: {command!r}")
    return files
