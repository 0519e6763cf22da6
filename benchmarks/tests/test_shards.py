"""The figures of shards: that they are printed, and that every byte is right."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")


def test_the_figures_of_shards() -> None:
    command = [sys.executable, "-m", "kvframework_bench.shards", "--tp", "4", "--tokens", "256", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^\| 4, 2 \| .* \| \d+\.\d\d x \| \d+\.\d\d x \|$", done.stdout, re.MULTILINE)) == 2
