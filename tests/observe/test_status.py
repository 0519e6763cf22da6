"""`kvframework status` against a real server, and without one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.core.cli.command import run
from tests.support.server_process import ServerProcess


def status(*arguments: str, columns: int = 200) -> subprocess.CompletedProcess[str]:
    return run("status", *arguments, COLUMNS=str(columns))


def test_status_shows_instances_and_l1() -> None:
    with ServerProcess() as server, server.client() as client:
        client.register(model_name="m[bold]x")
        shown = status("--endpoint", server.endpoint)
        assert shown.returncode == 0
        assert "L1 0 B of 64.0 MiB" in shown.stdout
        assert "m[bold]x" in shown.stdout
        document = json.loads(status("--endpoint", server.endpoint, "--json").stdout)
        assert document["instances"][0]["model"] == "m[bold]x"
        assert document["server"]["chunk_size"] == 256


def test_a_pipe_gets_one_line_for_each_tier(tmp_path: Path) -> None:
    with ServerProcess("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}") as server:
        shown = status("--endpoint", server.endpoint, columns=40).stdout
        (line,) = [line for line in shown.splitlines() if line.startswith("L2 ")]
        assert line.startswith("L2 filesystem: circuit ")
        assert line.endswith(" to write")


def test_without_a_server_the_error_says_what_to_do() -> None:
    shown = status("--endpoint", "ipc:///tmp/kvf-nobody/s.sock", "--timeout", "0.3")
    assert shown.returncode == 2
    assert "run.server_gone" in shown.stderr
    assert "kvframework serve" in shown.stderr
    assert shown.stderr.count("run.server_gone") == 1
    assert "Traceback" not in shown.stderr
