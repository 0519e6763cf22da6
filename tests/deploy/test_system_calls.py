"""The units cannot be started in a test, but what they would refuse can be seen: no process makes a system call that
its unit's filter denies."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.test_systemd import FOLDER
from tests.support.observe_process import get, listening_url
from tests.support.processes import ran
from tests.support.waiting import wait_until

has_both = shutil.which("strace") and shutil.which("systemd-analyze")
pytestmark = [pytest.mark.skipif(not has_both, reason="needs strace, systemd"), pytest.mark.timeout(900)]
LONG_S = 300.0


class Traced:
    """A command under strace. A context manager."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self._trace, self._log = folder / f"{name}.trace", folder / f"{name}.log"
        command = ["strace", "-f", "-qq", "-o", str(self._trace), sys.executable, "-m", "kvframework.cli.main", name]
        with self._log.open("w") as log:
            self._strace = subprocess.Popen([*command, *arguments], stderr=log)

    def __enter__(self) -> Traced:
        return self

    def __exit__(self, *_: object) -> None:
        # strace passes no signal on, so the first process that it traces gets it.
        if self._strace.poll() is None and (lines := self._trace.read_text().split(None, 1)):
            os.kill(int(lines[0]), signal.SIGTERM)
        self._strace.wait(LONG_S)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def calls(self) -> set[str]:
        return set(re.findall(r"^\d+\s+(\w+)\(", self._trace.read_text(), re.MULTILINE))


@pytest.fixture(scope="module")
def calls() -> Iterator[dict[str, set[str]]]:
    """The system calls of a whole life, by the name of the command."""
    with tempfile.TemporaryDirectory(prefix="kvf-") as place:
        folder, endpoint = Path(place), f"ipc://{place}/server.sock"
        (folder / "kvf.toml").write_text(
            f'[server]\nendpoint = "{endpoint}"\n[l1]\nuse = "pinned"\ncapacity = "16MiB"\n'
            f'[[l2]]\nuse = "filesystem"\npath = "{place}/l2"\ncapacity = "16MiB"\n'
        )
        server = Traced(folder, "serve", "--config", f"{place}/kvf.toml")
        observe = Traced(folder, "observe", "--endpoint", endpoint, "--listen", "127.0.0.1:0")
        with server, observe:

            def ready() -> bool:
                url = listening_url(observe.log)
                return url is not None and get(url, "/readyz").status == 200

            wait_until(ready, LONG_S, "a server that is ready")
        yield {"serve": server.calls(), "observe": observe.calls()}


@pytest.mark.parametrize(
    ("name", "unit"), [("serve", "kvframework.service"), ("observe", "kvframework-observe.service")]
)
def test_a_unit_denies_no_call_of_its_process(name: str, unit: str, calls: dict[str, set[str]]) -> None:
    lists = re.findall(r"^SystemCallFilter=(~?)(.*)$", (FOLDER / unit).read_text(), re.MULTILINE)
    assert [mark for mark, _ in lists] == ["", "~"]
    (_, allowed), (_, denied) = lists
    permitted = members(allowed) - members(denied)
    assert {"read", "mmap", "openat"} <= permitted & calls[name]
    assert calls[name] - permitted == set()


def members(groups: str) -> set[str]:
    """The system calls of groups such as "@basic-io"."""
    found: set[str] = set()
    for group in groups.split():
        shown = ran("systemd-analyze", "syscall-filter", group, timeout=120)
        for line in map(str.strip, shown.stdout.splitlines()[1:]):
            if line and not line.startswith("#"):
                found |= members(line) if line.startswith("@") else {line}
    return found
