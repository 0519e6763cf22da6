"""Real processes: `kvframework observe` beside servers that come, go and stop, and as the child of a server."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parsed

from tests.observe.documents import document
from tests.support.observe_process import SLOW_S, Got, ObserveProcess, get, listening_url
from tests.support.server_process import ServerProcess, server_fixture
from tests.support.waiting import wait_until


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
