"""The transport kit begins with the simplest test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvf_dev.testing.kit import wait_until


def test_what_does_not_come_true_is_one_sentence() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"^the end of it did not come true within 0 s$"):
        wait_until(lambda: False, "the end of it", 0.0)


def test_the_simplest_round_trip_runs_first(tmp_path: Path) -> None:
    source = "from kvf_dev.testing import TransportConformance\nclass TestIt(TransportConformance): ..."
    (tmp_path / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-c", os.devnull, "--rootdir", ".", "test_it.py"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[0].partition("[")[0].endswith("::test_what_is_stored_comes_back_in_other_blocks")
