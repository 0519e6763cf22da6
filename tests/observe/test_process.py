"""Real processes: `kvframework observe` beside servers that come, go and stop, and as the child of a server.
`kvframework status --check`: the health of a real server as an exit status."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parsed

from tests.core.cli import hanging_tier
from tests.core.cli.command import run
from tests.core.registry.fake_distributions import install
from tests.observe.documents import document
from tests.support.observe_process import SLOW_S, Got, ObserveProcess, get, listening_url
from tests.support.redis_server import RedisServer
from tests.support.server_process import ServerProcess, server_fixture
from tests.support.waiting import wait_until
from tests.support.wire_client import key_for


def value(text: str, name: str) -> float | None:
    """The first sample of this name; None if it has no series."""
    samples = (sample for family in parsed(text) for sample in family.samples)
    return next((sample.value for sample in samples if sample.name == f"kvframework_{name}"), None)


def test_it_finds_the_server_that_comes_goes_hangs_and_comes_again() -> None:
    with ServerProcess() as server, ObserveProcess(server.endpoint) as observe:
        ask = observe.get

        def answers(status: int) -> bool:
            up = value(ask("/metrics").text, "up") == (status == 200)
            return up and {ask(path).status for path in ("/livez", "/readyz", "/status")} == {status}

        def boot() -> str | None:
            return json.loads(ask("/status").text).get("server", {}).get("boot_id")

        wait_until(lambda: answers(200), SLOW_S, "the first answer")
        wait_until(boot, SLOW_S, "a status")
        first = boot()
        server.sigstop()
        wait_until(lambda: answers(503), SLOW_S, "the end of liveness")
        server.sigcont()
        wait_until(lambda: answers(200), SLOW_S, "liveness")
        server.kill9()
        wait_until(lambda: answers(503), SLOW_S, "the absence of the server")
        assert ask("/").status == 200
        assert value(ask("/metrics").text, "lookups_total") is None
        server.start()
        wait_until(lambda: boot() not in (None, first), SLOW_S, "the new server")
        assert {point[1] for point in json.loads(ask("/history.json").text)["seconds"]} == {1, 2}
        observe.process.terminate()
        assert observe.process.wait(SLOW_S) == 0, observe.log


def test_it_ends_at_a_signal_also_without_a_server() -> None:
    with tempfile.TemporaryDirectory(prefix="kvf-") as folder, ObserveProcess(f"ipc://{folder}/none.sock") as observe:
        assert observe.get("/livez").status == 503
        observe.process.send_signal(signal.SIGINT)
        assert observe.process.wait(SLOW_S) == 0, observe.log
        assert "Traceback" not in observe.log
        assert observe.log.count("no status: [run.server_gone] no server answers") <= 1
        assert len(observe.log.splitlines()) < 12


server = server_fixture("observe.listen=127.0.0.1:0", scope="module")


def ask(server: ServerProcess, path: str) -> Got:
    url = listening_url(server.log)
    return get(url, path)


def child(server: ServerProcess) -> int | None:
    pid = server.status()["observe"]["pid"]
    assert pid is None or isinstance(pid, int)
    return pid


def test_a_server_starts_it_in_a_process_of_its_own(server: ServerProcess) -> None:
    wait_until(lambda: listening_url(server.log), SLOW_S, "the address")
    wait_until(lambda: ask(server, "/readyz").status == 200, SLOW_S, "readiness")
    pid = child(server)
    assert pid not in (None, server.pid)
    assert f"\nPPid:\t{server.pid}\n" in Path(f"/proc/{pid}/status").read_text()
    assert "h11" not in Path(f"/proc/{server.pid}/maps").read_text()


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 6, "40")])
def test_its_end_is_a_problem_and_a_line_and_it_is_started_again(server: ServerProcess, number: int, name: str) -> None:
    wait_until(lambda: child(server), SLOW_S, "the process")
    before, seen = child(server), server.log.count("metrics, health and the page")
    os.kill(before, number)
    problem = {"where": "observe", "fact": f"`kvframework observe` ended by signal {name}"}
    wait_until(lambda: problem in server.status()["problems"], SLOW_S, "the problem")
    assert f"observe runs again: `kvframework observe` ended by signal {name}" in server.log
    wait_until(lambda: server.log.count("metrics, health and the page") > seen, SLOW_S, "the next process")
    assert child(server) != before
    wait_until(lambda: ask(server, "/readyz").status == 200, SLOW_S, "readiness")


@pytest.mark.parametrize("how", ["stop", "kill9"])
def test_it_ends_with_the_server(how: str) -> None:
    with ServerProcess("observe.listen=127.0.0.1:0") as server:
        wait_until(lambda: listening_url(server.log), SLOW_S, "the address")
        pid = child(server)
        assert pid is not None
        status = server.stop() if how == "stop" else server.kill9()
        assert not status
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), SLOW_S, "the end of the child")


def test_it_ends_also_if_the_server_was_killed_before_it_began() -> None:
    with ServerProcess("observe.listen=127.0.0.1:0") as server:
        wait_until(lambda: listening_url(server.log), SLOW_S, "the address")
        before = child(server)
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: child(server) not in (None, before), SLOW_S, "the next process, which still imports")
        pid = child(server)
        server.kill9()
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), SLOW_S, "the end of the child")


def test_the_document_of_the_other_tests_is_that_of_a_server(server: ServerProcess) -> None:
    live, ours = server.status(), document()
    assert set(live) == set(ours)
    for part in ("l1", "lookups", "messaging", "losses", "requests", "observe", "use"):
        assert set(live[part]) == set(ours[part]), part


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
