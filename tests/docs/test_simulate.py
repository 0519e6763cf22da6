"""The example of docs/simulate.md: its trace, its command and its program give what the page shows."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.cli.command import run
from tests.docs.shown import blocks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "simulate.md").read_text()


@pytest.fixture(autouse=True)
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shown,) = blocks(PAGE, "json")
    (tmp_path / "trace.jsonl").write_text(shown)
    monkeypatch.chdir(tmp_path)


def test_the_command_prints_what_is_shown() -> None:
    command = shlex.split(blocks(PAGE, "bash")[1].replace("\\\n", ""))
    done = run(*command[1:])
    assert (done.returncode, done.stderr) == (0, "")
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    (shown,) = blocks(PAGE, "text")
    assert [line for line in printed if line] == [line for line in shown.splitlines() if line]


def test_the_program_runs() -> None:
    (program,) = blocks(PAGE, "python")
    subprocess.run([sys.executable, "-c", program], check=True)
