"""`kvframework doctor`: exit statuses, the document, and the table that a person reads. An installation without a C
compiler: the server, an engine, the doctor and the status say so, each in one line."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.core.cli.command import run
from tests.support.processes import ran
from tests.support.server_process import ServerProcess

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


ENGINE = """
import logging, sys
logging.basicConfig(format="%(message)s")
from kvframework.client import KVClient, WorkerAdapter
with KVClient(sys.argv[1]) as client:
    assert client.wait_up(60)
    for number in (1, 2):
        WorkerAdapter(client, instance_id=number, model_name="m").close()
"""
MISSING = ("copies of cpu_gather", "hashes", "planes of codecs", "copies that bypass caches", "packing of token ids")
LINE = f"compiled kernels are missing, so these are slower: {', '.join(MISSING)}"
PACKAGES = ("kvframework", "kvf_pinned", "kvf_eviction", "kvf_hashers", "kvf_cpu_gather", "kvf_codecs", "kvf_layouts")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what is installed without its libraries, first in the path of processes."""
    folder = tmp_path / "bare"
    for name in PACKAGES:
        found = find_spec(name)
        assert found.origin is not None
        shutil.copytree(Path(found.origin).parent, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.chdir(tmp_path)  # a checkout in the working directory would come before it
    return folder


def said(log: str) -> int:
    return log.count(LINE)


def test_it_is_said_once_by_each(bare: Path) -> None:
    with ServerProcess() as server:
        assert said(server.log) == 1
        assert "put a C compiler into PATH and run: pip install " in server.log
        assert len(server.status()["server"]["missing_kernels"]) == len(MISSING)
        engine = ran(sys.executable, "-c", ENGINE, server.endpoint, timeout=120)
        assert said(engine.stderr) == 1
        shown = run("status", "--endpoint", server.endpoint, COLUMNS="200").stdout
        assert said(shown) == 1
    doctor = ran(
        sys.executable,
        "-m",
        "kvframework.cli.main",
        "doctor",
        "--json",
        code=None,
        env=os.environ | {"KVFRAMEWORK_CONFIG": ""},
    )
    (found,) = (each for each in json.loads(doctor.stdout)["findings"] if each["id"] == "kvframework.kernels")
    assert (found["level"], said(found["fact"])) == ("warn", 1)
    assert "pip install" in found["advice"]


def test_where_they_are_there_nothing_is_said() -> None:
    from kvframework.api.installing import missing_kernels

    if missing_kernels():
        pytest.skip("this installation has none")
    with ServerProcess() as server:
        assert "kernels" not in server.log
        assert server.status()["server"]["missing_kernels"] == []
