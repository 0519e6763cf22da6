"""The figures of the peers tier: that they are printed."""

from __future__ import annotations

import subprocess
import sys


def test_the_figures_of_peers() -> None:
    command = [sys.executable, "-m", "kvframework_bench.peers", "--mib", "1"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--lookups", "1"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[2].startswith("| 1 MiB | ")
    assert lines[6].startswith("| 1k tokens | ")
