"""What docs/security.md says holds: its commands serve a client over TCP."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.core.cli.command import run
from tests.docs.shown import blocks
from tests.support.ports import free_port
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()


def test_its_commands_serve_a_client_on_another_host(tmp_path: Path) -> None:
    """In one folder and over the loopback, else word for word."""
    make, serve, ask = blocks(PAGE, "bash")
    (toml,) = [block for block in blocks(PAGE, "toml") if "curve" in block]
    port = free_port()

    def here(text: str) -> str:
        return text.replace("/etc/kvframework", str(tmp_path / "etc")).replace("10.0.0.1:5555", f"127.0.0.1:{port}")

    for line in here(make).splitlines():
        assert run(*shlex.split(line)[1:]).returncode == 0, line
    (tmp_path / "etc" / "kvf.toml").write_text(here(toml))
    environment = dict(
        line.removeprefix("export ").split("=", 1) for line in here(ask).splitlines() if "export" in line
    )
    command = [sys.executable, "-m", "kvframework.cli.main", *shlex.split(here(serve))[1:]]
    with tempfile.TemporaryDirectory(prefix="kvf-") as short:  # socket paths are
        local = ["--set", f"server.endpoint=ipc://{short}/s", "--set", "l1.capacity=1MiB"]
        serve_it([*command, *local], environment)


def serve_it(command: list[str], environment: dict[str, str]) -> None:
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: run("status", "--json", **environment).returncode == 0, 30)
        finally:
            server.terminate()
        assert server.wait(60) == 0
