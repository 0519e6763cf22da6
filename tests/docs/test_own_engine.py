"""docs/engines/own_engine.md shows parts of the example, whose second process hits, by socket and over TCP."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from runpy import run_path
from textwrap import indent

import pytest

from tests.core.cli.command import run
from tests.docs.shown import blocks
from tests.support.ports import free_port
from tests.support.processes import ran
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "engines" / "own_engine.md").read_text()
PROGRAM = ROOT / "examples" / "own_engine" / "own_engine.py"
SAYS = re.compile(r"loaded (\d+) of 1000 tokens, the next token is (\d+)")

pytestmark = pytest.mark.torch


def engine(**environment: str) -> tuple[int, int, str]:
    """One process of the engine: tokens that it loaded, the next token, and its whole output. Blocking."""
    scaled = {"KVFRAMEWORK_DEADLINE_SCALE": "20", **environment}
    done = ran(sys.executable, "-W", "error", str(PROGRAM), code=None, env=os.environ | scaled)
    said = SAYS.search(done.stdout)
    assert done.returncode == 0, done.stderr
    assert said, done.stdout + done.stderr
    return int(said[1]), int(said[2]), done.stdout


def test_the_guide_shows_parts_of_the_program() -> None:
    connecting, transfers, *_ = blocks(GUIDE, "python")
    program = PROGRAM.read_text()
    assert indent(connecting, " " * 8) in program
    assert indent(transfers, " " * 4) in program


def test_the_program_imports_only_the_client_and_the_errors() -> None:
    imported = set(re.findall(r"^from (kvframework\S*) import", PROGRAM.read_text(), re.MULTILINE))
    assert imported == {"kvframework.client", "kvframework.errors"}


def test_the_second_process_hits_over_the_socket() -> None:
    with ServerProcess() as server:
        first, computed, told = engine(KVFRAMEWORK_ENDPOINT=server.endpoint)
        assert "stored=3" in told
        again, loaded, told = engine(KVFRAMEWORK_ENDPOINT=server.endpoint)
        assert "outcome" not in told, "all of it is there"
        status = server.status()
    assert (first, again) == (0, 768)
    assert loaded == computed
    assert status["l1"]["pins"] == status["tickets"] == 0
    assert status["instances"] == []


def test_the_second_process_hits_over_tcp(tmp_path: Path) -> None:
    """By the guide's own commands, in another folder and at a free port."""
    make, serve = blocks(GUIDE, "bash")[2].replace("\\\n", "").splitlines()
    places = {"tcp://127.0.0.1:5555": f"tcp://127.0.0.1:{free_port()}", "keys/": f"{tmp_path}/keys/"}

    def here(line: str) -> str:
        for there, place in places.items():
            line = line.replace(there, place)
        return line

    made = run(*shlex.split(here(make).replace("new keys ", f"new {tmp_path}/keys "))[1:])
    assert made.returncode == 0, made.stderr
    settings = [word for word in shlex.split(here(serve))[2:] if word != "--set"]
    exported = re.findall(r"^export (\w+)=(\S+)$", blocks(GUIDE, "bash")[3], re.MULTILINE)
    environment = {name: here(value) for name, value in exported}
    with ServerProcess(*settings):
        first, computed, _ = engine(**environment)
        again, loaded, _ = engine(**environment)
    assert (first, again) == (0, 768)
    assert loaded == computed


def test_it_outlives_its_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It computes while there is none, and hits again at the next one."""
    prompt = list(range(600))
    with ServerProcess() as server:
        monkeypatch.setenv("KVFRAMEWORK_ENDPOINT", server.endpoint)
        monkeypatch.setenv("KVFRAMEWORK_DEADLINE_SCALE", "20")
        engine = run_path(str(PROGRAM))["Engine"]()
        try:
            engine.answer(prompt)
            boot = engine.cache.client.boot_id
            server.kill9()
            engine.answer(prompt)
            server.start()
            wait_until(lambda: engine.cache.client.usable and engine.cache.client.boot_id != boot, 60)
            engine.answer(prompt)
            engine.answer(prompt)
        finally:
            engine.cache.close()
    said = capsys.readouterr().out
    assert re.findall(r"loaded (\d+) of 600", said) == ["0", "0", "0", "512"]
    assert re.findall(r"stored=(\d)", said) == ["2", "0", "2"]
    assert len(set(re.findall(r"next token is (\d+)", said))) == 1


def test_without_a_server_it_computes() -> None:
    hit, _, told = engine(KVFRAMEWORK_ENDPOINT="ipc:///nonexistent/s.sock", KVFRAMEWORK_DEADLINE_SCALE="1")
    assert hit == 0
    assert "runs without a cache: [run.server_gone]" in told


def test_the_guides_other_lines_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In their order, in the example's names: a view, a scheduler process, a rank, a part of a prompt, preemption."""
    monkeypatch.setenv("KVFRAMEWORK_DEADLINE_SCALE", "20")
    view, scheduling, ranked, part, preemption = blocks(GUIDE, "python")[2:]

    def run_lines(lines: str) -> None:
        file = tmp_path / "lines.py"
        file.write_text(lines)
        names.update(run_path(str(file), init_globals=names))

    with ServerProcess() as server:
        monkeypatch.setenv("KVFRAMEWORK_ENDPOINT", server.endpoint)
        names = run_path(str(PROGRAM))
        engine = names["Engine"]()
        engine.answer(prompt := list(range(1000)))
        worker = engine.cache.worker
        names |= {"kv": engine.kv, "client": engine.cache.client, "chunk": engine.cache.chunk, "prompt": prompt}
        names |= {"namespace": worker.registration.namespace, "world_size": 1, "worker": worker}
        worker.close()
        run_lines(view)
        worker.register_kv_caches(engine.kv, block_size=names["BLOCK"], view=names["View"]())
        run_lines(scheduling)
        assert names["found"].hit_tokens == 768
        run_lines(ranked)
        names |= {"own": 300, "table": list(range(62))}
        run_lines(part)
        assert names["future"].result(60).ok
        names["futures"] = [names["future"]]
        run_lines(preemption)
        wait_until(lambda: server.status()["tickets"] == 0, what="the next PING")
        engine.cache.close()
