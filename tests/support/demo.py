"""`kvframework demo` as a process, and what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "kvframework.cli.main", "demo"]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Where the demo puts its directory, short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="kvf-t-") as directory:
        yield Path(directory)


def demo(temporary: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the demo to its end; `temporary` is where it puts its directory."""
    environment = {**os.environ, "TMPDIR": str(temporary), **variables}
    return subprocess.run(
        [*COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def left_behind(temporary: Path) -> list[str]:
    """Files below `temporary` and processes that name it."""
    files = [str(path) for path in temporary.iterdir()]
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if str(temporary).encode() in command:
            files.append(f"{entry.name}: {command!r}")
    return files
