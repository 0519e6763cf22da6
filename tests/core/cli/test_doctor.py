"""`kvframework doctor`: exit statuses, the document, and the table that a person reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.core.cli.command import run

SMALL = ("--set", "l1.capacity=1MiB")


def test_a_machine_that_is_well_is_status_0(tmp_path: Path) -> None:
    done = run("doctor", *SMALL, "--json", XDG_RUNTIME_DIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document.keys() == {"findings", "ok", "warn", "fail"}
    assert document["findings"][0].keys() == {"id", "level", "fact", "advice", "where"}
    assert document["fail"] == 0
    assert document["ok"] + document["warn"] == len(document["findings"])
    subjects = {each["id"].split(".")[0] for each in document["findings"]}
    assert subjects == {"config", "python", "kvframework", "memory", "limits", "numa", "socket", "plugin", "pinned"}


def test_a_failure_is_status_1_and_reads_well(tmp_path: Path) -> None:
    config = tmp_path / "kvf.toml"
    config.write_text(
        '[l1]\nuse = "pinned"\ncapacity = "900TiB"\n[[l2]]\nuse = "filesystm"\n[hasher]\nuse = "sha256"\n'
    )
    done = run("doctor", "--config", str(config), XDG_RUNTIME_DIR=str(tmp_path), FORCE_COLOR="1", TERM="xterm")
    assert (done.returncode, done.stderr) == (1, "")
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).splitlines()]
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "fail storage.arena" in text
    assert "hint: lower [l1] capacity" in text
    assert "hint: did you mean 'filesystem'?" in text
    assert lines[-1].endswith("2 failed")


def test_a_configuration_that_cannot_be_read_is_a_finding(tmp_path: Path) -> None:
    done = run("doctor", "--config", str(tmp_path / "none.toml"), "--json")
    assert (done.returncode, done.stderr) == (1, "")
    findings = {each["id"]: each for each in json.loads(done.stdout)["findings"]}
    assert findings["config.file"]["level"] == "fail"
    assert findings["limits.memlock"]["level"] == "ok"
    assert "plugin.usable" not in findings


def test_for_a_pipe_a_finding_is_a_line(tmp_path: Path) -> None:
    done = run("doctor", "--config", str(tmp_path / "none.toml"))
    (line,) = (line for line in done.stdout.splitlines() if "config.file" in line)
    assert re.match(r"fail +config.file .*none\.toml: the file cannot be read: .*; hint: ", line)
