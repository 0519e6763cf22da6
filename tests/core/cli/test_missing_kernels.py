"""An installation without a C compiler: the server, an engine, the doctor and the status say so, each in one line."""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.core.cli.command import run
from tests.support.processes import ran
from tests.support.server_process import ServerProcess

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
