"""The units: accepted and rated by systemd itself, and in step with what they start."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.core.cli.command import run
from tests.support.processes import ran

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
