"""The figures of a router: that they are printed, and that nothing of what they compare is wrong."""

from __future__ import annotations

import re
import subprocess
import sys


def test_the_figures_of_a_router() -> None:
    command = [sys.executable, "-m", "kvframework_bench.route", "--blocks", "20000", "--nodes", "2", "--many", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    rows = dict(re.findall(r"^\| (.*) \| (.*) \|$", done.stdout, re.MULTILINE))
    assert rows["blocks announced, and without room"] == "16,384, 0"
    assert rows["memory a block: of the tables, resident"].startswith("40.")
    assert rows["new ones in their places, and without room"] == "8,192, 0"
    assert any("all 3 nodes have them" in name for name in rows)
