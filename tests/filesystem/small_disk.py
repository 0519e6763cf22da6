"""A small file system of a test's own: it runs full, and can be mounted read-only."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(size: str) -> Iterator[Path]:
    """Skips the test where mounting is refused."""
    with tempfile.TemporaryDirectory(prefix="kvf-disk-") as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", folder]
        try:
            mounted = subprocess.run(command, capture_output=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if mounted.returncode:
            pytest.skip(f"mount is refused: {mounted.stderr.decode().strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def remount(disk: Path, mode: str) -> None:
    """`mode` is "ro" or "rw"."""
    subprocess.run(["mount", "-o", f"remount,{mode}", str(disk)], check=True)
