"""The units: accepted and rated by systemd itself, and in step with what they start. The units cannot be started in a
test, but what they would refuse can be seen: no process makes a system call that its unit's filter denies."""

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

from tests.core.cli.command import run
from tests.support.observe_process import get, listening_url
from tests.support.processes import ran
from tests.support.waiting import wait_until

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
COMMAND = "/opt/kvframework/bin/kvframework"
# Exposure in tenths: "OK" up to here.
MOST = 45
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return ran("systemd-analyze", *arguments, code=None, timeout=120)


def setting(unit: Path, name: str) -> str:
    found = re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)
    assert len(found) == 1, f"{unit.name}: {name}"
    return str(found[0])


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_leaves_little_exposed(unit: Path) -> None:
    rated = analyze("security", "--offline=true", f"--threshold={MOST}", "--no-pager", str(unit))
    assert rated.returncode == 0, rated.stdout + rated.stderr


@needs_systemd
def test_systemd_finds_no_mistake(tmp_path: Path) -> None:
    # It ignores, and says so, what it does not know yet.
    newer = "FileDescriptorStorePreserve" if int(analyze("--version").stdout.split()[1]) < 254 else "none is newer"
    for unit in UNITS:
        # It looks for the command, which is not installed here.
        (tmp_path / unit.name).write_text(unit.read_text().replace(COMMAND, "/bin/true"))
    verified = analyze("verify", "--man=no", *map(str, sorted(tmp_path.iterdir())))
    # Of units of the machine, which these name, it may complain, too.
    assert [line for line in verified.stderr.splitlines() if "kvframework" in line and newer not in line] == []


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="needs systemd-sysusers")
def test_the_user_can_be_made() -> None:
    file = FOLDER / "kvframework.sysusers.conf"
    ran("systemd-sysusers", "--dry-run", str(file))
    assert " 10001 " in file.read_text()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_its_command_is_understood(unit: Path) -> None:
    command, *arguments = setting(unit, "ExecStart").split()
    assert command == COMMAND
    shown = run(arguments[0], "--help")
    assert shown.returncode == 0
    assert [each for each in arguments if each.startswith("--") and each not in shown.stdout] == []


def test_both_run_as_one_user_without_capability_and_not_again_after_status_2() -> None:
    assert {setting(unit, "RestartPreventExitStatus") for unit in UNITS} == {"2"}
    assert {setting(unit, "User") for unit in UNITS} == {"kvframework"}
    assert {setting(unit, "CapabilityBoundingSet") for unit in UNITS} == {""}


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
