"""docs/tutorial.md can be followed on a CPU: its commands run in order, in one shell, and print what stands there."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.docs.shown import blocks
from tests.support.ports import free_port
from tests.support.redis_server import redis_executable

ROOT = Path(__file__).resolve().parents[2]
WHOLE = (ROOT / "docs" / "tutorial.md").read_text()
PAGE = WHOLE.split("\n## On a CPU\n")[1].split("\n## ")[0]
STEP = re.compile(r"(?:^Save as `([\w.]+)`:\n\n)?^```(bash|toml|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = "=== step"

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
# Writes the metadata of each folder that it is given, as pip does; the folders are on the path.
PIP = """
import sys, pathlib
from tests.docs.shown import entry_points
from tests.core.registry.fake_distributions import install
for place in map(pathlib.Path, sys.argv[2:]):
    if (place / "pyproject.toml").exists():
        install(pathlib.Path("site"), place.name, entry_points((place / "pyproject.toml").read_text()))
"""


class Shell:
    """The reader's shell in a folder of their own: programs of this environment, a free port, a private socket.

    `pip` writes metadata only, see `PIP`; what cannot be seen from outside is waited for behind each server's start.
    """

    def __init__(self, folder: Path, short: Path) -> None:
        self.folder, self._short = folder, short
        self._port = str(free_port())
        programs = folder / "bin"
        programs.mkdir()
        python = shlex.quote(sys.executable)
        for name, line in {
            "python": f"exec {python} -W error",
            "python3": f"exec {python}",
            "kvframework": f"exec {python} -m kvframework.cli.main",
            "pytest": f"exec {python} -m pytest -p no:cacheprovider -W error -c {os.devnull} --rootdir .",
            "redis-server": f"exec {shlex.quote(redis_executable())}",
            "pip": f"exec {python} {programs / 'pip.py'}",
        }.items():
            (programs / name).write_text(f'#!/bin/sh\n{line} "$@"\n')
            (programs / name).chmod(0o755)
        (folder / "examples").symlink_to(ROOT / "examples")
        (programs / "pip.py").write_text(PIP)
        (folder / "site").mkdir()
        self.environment = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": f"{folder / 'site'}:{folder / 'kvf-mystore'}:{ROOT / 'examples' / 'kvf-sqlite'}:{ROOT}",
            "XDG_RUNTIME_DIR": str(short),
            "KVFRAMEWORK_DEADLINE_SCALE": "20",
            "KVFRAMEWORK_CONFIG": "",
            "COLUMNS": "200",
        }
        self.environment.pop("KVFRAMEWORK_ENDPOINT", None)

    def here(self, text: str) -> str:
        return text.replace("6379", self._port).replace("/tmp/kvf-node-2", str(self._short / "2"))

    def script(self, lines: str) -> str:
        """The reader's lines. Where one starts something, the next waits until it answers."""
        done = []
        for line in lines.splitlines():
            # An environment is there already.
            done.append(self.here(line) if "venv" not in line else ":")
            if line.startswith("kvframework serve"):
                endpoint = "".join(re.findall(r"server\.endpoint=(\S+)", done[-1]))
                ask = f"kvframework status {'--endpoint ' + endpoint if endpoint else ''}"
                done.append(f"until {ask} > /dev/null 2>&1; do sleep 0.1; done")
            if line.startswith("redis-server"):
                done.append(f"until (: < /dev/tcp/127.0.0.1/{self._port}) 2> /dev/null; do sleep 0.1; done")
        return "\n".join(done)

    def run(self, script: str) -> tuple[int, str, str]:
        """Status, output and errors of a shell; its background processes are ended with it."""
        with (self.folder / "errors").open("w+") as errors, (self.folder / "output").open("w+") as output:
            shell = subprocess.Popen(
                ["bash", "-e", "-c", script],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
            try:
                status = shell.wait(500)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGKILL)
                shell.wait()
            return status, (self.folder / "output").read_text(), (self.folder / "errors").read_text()


def test_it_can_be_followed(tmp_path: Path) -> None:
    steps: list[str] = []
    expected: dict[int, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="kvf-") as short:
        shell = Shell(tmp_path, Path(short))
        for name, language, text in STEP.findall(PAGE):
            if language == "bash":
                steps.append(f"echo '{MARK}'\n{shell.script(text)}")
            elif language == "toml":
                (tmp_path / name).write_text(shell.here(text))
            else:
                expected[len(steps)] = text.splitlines()
        status, output, errors = shell.run("\n".join(steps))
    assert status == 0, output[-3000:] + errors[-5000:]
    printed = output.split(MARK)
    for step, lines in expected.items():
        for line in lines:
            pattern = ".*".join(map(re.escape, line.split("…")))
            assert re.search(pattern, printed[step]), (line, printed[step])
    assert len(set(re.findall(r"the next token is (\d+)", output))) == 1


def test_every_block_is_one_of_those_that_are_run() -> None:
    fences = re.findall(r"^```(\w+)$", PAGE, re.MULTILINE)
    assert fences == [language for _, language, _ in STEP.findall(PAGE)]
    assert all(name for name, language, _ in STEP.findall(PAGE) if language == "toml")


def test_a_hit_takes_fewer_than_15_commands() -> None:
    """On a CPU up to the second engine's hit, on a GPU all."""
    for section, end in (("On a CPU", "\n### "), ("On a GPU", "\n## ")):
        text = WHOLE.split(f"\n## {section}\n")[1].split(end)[0]
        commands = [line for block in blocks(text, "bash") for line in block.splitlines()]
        assert 5 < len(commands) < 15, section
