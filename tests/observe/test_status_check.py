"""`kvframework status --check`: the health of a real server as an exit status."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.core.cli import hanging_tier
from tests.core.cli.command import run
from tests.core.registry.fake_distributions import install
from tests.support.redis_server import RedisServer
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import key_for

# A server whose serving thread hangs as soon as the file named by KVF_TEST_HANG is there; all its other threads live.


def check(server: ServerProcess, timeout: float = 10.0) -> subprocess.CompletedProcess[str]:
    return run("status", "--check", "--endpoint", server.endpoint, "--timeout", str(timeout))


@pytest.mark.redis
def test_a_tier_that_is_down_is_named_until_it_is_back(tmp_path: Path) -> None:
    settings = ("l2.0.use=redis", "l2.0.timeout_s=0.5")
    with (
        RedisServer(tmp_path) as redis,
        ServerProcess(*settings, f"l2.0.url={redis.url}") as server,
        server.client() as client,
    ):
        redis.kill9()
        client.store(key_for(client.register(), range(256)), b"x")
        wait_until(lambda: client.status()["problems"], 60, "the tier's failure to be seen")
        done = check(server)
        (line,) = done.stdout.splitlines()
        assert (done.returncode, done.stderr) == (1, "")
        # The reads follow once the idle tier was asked often enough.
        assert line.startswith(("l2.0: redis is down for writes", "l2.0: redis is down for reads and writes"))
        assert "[storage.tier]" in line
        redis.start()
        wait_until(lambda: not client.status()["problems"], 60, "the tier's return")
        assert check(server).returncode == 0
        assert "tier redis is down for writes: [storage.tier]" in server.log
        assert "tier redis works again for writes after " in server.log


def test_a_tier_whose_writes_hang_is_named_until_they_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They never fail, so no circuit opens."""
    site, hang = tmp_path / "site", tmp_path / "hang"
    site.mkdir()
    install(site, "hanging-kvf", {"tier.hanging": hanging_tier.__name__})
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{path}" if path else str(site))
    hang.touch()
    settings = ("l2.0.use=hanging", f"l2.0.while_there={hang}", "l2.0.timeout_s=0.2")
    with ServerProcess(*settings) as server, server.client() as client:
        assert check(server).returncode == 0
        client.store(key_for(client.register(), range(256)), b"x")
        wait_until(lambda: client.status()["problems"], 60, "the hanging write to be seen")
        done = check(server)
        assert done.returncode == 1
        assert re.fullmatch(r"l2\.0: a put to hanging still runs \d+ s after its deadline\n", done.stdout)
        (tier,) = client.status()["l2"]
        assert (tier["state"], tier["pending_calls"], tier["overdue_call"]) == ("closed", 1, "put")
        assert tier["oldest_call_s"] > tier["overdue_s"] > 0
        hang.unlink()
        wait_until(lambda: not client.status()["problems"], 60, "the write's end")
        assert check(server).returncode == 0
        (tier,) = client.status()["l2"]
        assert (tier["overdue_call"], tier["overdue_s"]) == ("", 0.0)


def test_nobody_serves() -> None:
    done = run("status", "--check", "--endpoint", "ipc:///tmp/kvf-nobody/s.sock", "--timeout", "0.3")
    assert (done.returncode, done.stdout) == (2, "")
    assert "run.server_gone" in done.stderr


def test_a_server_that_is_stopped_does_not_answer() -> None:
    with ServerProcess() as server:
        server.sigstop()
        began = time.monotonic()
        assert check(server, timeout=0.5).returncode == 2
        assert time.monotonic() - began < 20
        server.sigcont()
        done = check(server)
        assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


def test_it_stands_alone() -> None:
    done = run("status", "--check", "--json")
    assert done.returncode == 2
    assert "--check" in done.stderr
