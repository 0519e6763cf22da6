"""The commands as processes: that they run, and the fields that they print. No figure is asserted."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvframework.client import LookupResult, SchedulerAdapter
from kvframework_bench.errors import BenchFailed
from kvframework_bench.lookup import bench_lookup
from kvframework_bench.server import running_server
from tests.support.waiting import wait_until

COMMAND = [sys.executable, "-m", "kvframework.cli.main", "bench"]
# The caller's own configuration must not reach the server that is measured.
ENVIRON = {**os.environ, "KVFRAMEWORK_CONFIG": "/there/is/no/such.toml", "COLUMNS": "80"}
SPREAD = {"min", "median", "max"}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=ENVIRON, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done


def document(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bench(*arguments, "--quick", "--json").stdout)
    assert found["bench"] == arguments[0]
    assert found["quick"] is True
    assert {"cpu", "cores", "memory_bytes", "kernel", "python", "packages"} == set(found["machine"])
    assert {"cores", "loadavg_1min", "others_before", "others_during", "busy"} == set(found["load"])
    figures: dict[str, Any] = found["figures"]
    return figures


def test_host() -> None:
    figures = document("host")
    names = [way["name"] for way in figures["copies"]]
    assert figures["copy"] in names
    for package in ("numpy", "torch"):
        assert any(package in name for name in names) is (importlib.util.find_spec(package) is not None)
    assert all(set(way["gb_s"]) == SPREAD for way in figures["copies"] + figures["transfers"])
    assert [echo["nbytes"] for echo in figures["echoes"]] == [64, 4096, 131072]
    assert {"p50_us", "p99_us", "max_us", "samples"} == set(figures["echoes"][0]["latency"])
    assert [way["name"] for way in figures["transfers"]] == ["sent", "received"]
    assert set(figures["server"]["memory"]) == {"anon", "file", "shmem"}
    assert figures["server"]["torch_loaded"] is False
    assert set(figures["server"]["start_s"]) == SPREAD
    assert "idle_cores" in figures["server"]


def test_lookup() -> None:
    figures = document("lookup")
    rows = {row["name"]: row for row in figures["requests"]}
    assert list(rows) == ["NOOP", *(f"LOOKUP {k}k, {word}" for k in (1, 8, 32) for word in ("hit", "miss"))]
    assert all(set(row["ratio"]) == SPREAD and row["latency"]["samples"] == 10 for row in rows.values())
    # 32 bytes a chunk of 256 tokens, and a little more.
    assert 0 < rows["LOOKUP 32k, hit"]["request_bytes"] - 128 * 32 < 200
    assert [row["tokens"] for row in figures["hashing"]] == [1024, 8192, 32768]


@pytest.mark.torch
def test_store() -> None:
    pytest.importorskip("torch")
    figures = document("store", "--shape", "1kb", "--shape", "12kb", "--blocks", "contiguous", "--rounds", "1")
    assert (figures["path"], figures["blocks"]) == ("arena", "contiguous")
    assert [shape["shape"] for shape in figures["shapes"]] == ["1kb", "12kb"]
    for shape in figures["shapes"]:
        assert shape["verified"] is True
        assert shape["rounds"] == 1
        assert shape["nbytes"] == shape["bytes_per_token"] * shape["tokens"] == shape["copy"]["nbytes"]
        assert set(shape["store"]["gb_s"]) == set(shape["retrieve"]["ratio_to_copy"]) == SPREAD


def test_l2(tmp_path: Path) -> None:
    figures = document("l2", "--part", "disk", "--folder", str(tmp_path))
    assert set(figures) == {
        "redis",
        "s3",
        "mooncake",
        "engine",
        "disk",
        "stalled",
        "new",
        "memory",
        "codecs",
        "skipped",
    }
    assert figures["redis"] is None
    assert figures["disk"]["rows"]
    assert all(set(row["ratio_to_reference"]) == SPREAD for row in figures["disk"]["rows"])


def test_tables_as_markdown_are_for_pasting() -> None:
    done = bench("lookup", "--quick", "--markdown")
    lines = done.stdout.splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == (2 + 7) + (2 + 3)
    assert all(line.rstrip().endswith("|") for line in rows)
    assert "kvframework" in lines[0]  # the machine and the versions
    assert "a quick run" in done.stderr


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_bench_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    short = tmp_path if len(str(tmp_path)) < 60 else None
    environ = ENVIRON | ({"TMPDIR": str(short)} if short else {})
    process = subprocess.Popen([*COMMAND, "lookup"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        wait_until(lambda: len(children(process.pid)) == 2, 30, "server and peer")
        started = children(process.pid)
        process.send_signal(number)
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


@pytest.mark.timeout(60)
def test_an_interrupt_while_a_socket_is_made_ends_the_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    add = zmq.Context._add_socket

    def interrupted(context: Any, socket: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        add(context, socket)

    monkeypatch.setattr(zmq.Context, "_add_socket", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), running_server(tmp_path, 1 << 20):
            pass
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.redis
def test_a_stalled_redis_is_not_left_behind() -> None:
    """It is stopped, and so does not react to SIGTERM."""
    command = [*COMMAND, "l2", "--part", "stalled"]
    process = subprocess.Popen(command, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        wait_until(lambda: any(stopped(pid) for pid in children(process.pid)), 40, "a stalled Redis")
        started = children(process.pid)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert len(started) == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


def stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
        return False


def test_a_wrong_answer_makes_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup that fails reads as a miss, and as a fast one."""

    def failing(self: SchedulerAdapter, *_args: object) -> LookupResult:
        self.failures += 1
        return LookupResult(0)

    monkeypatch.setattr(SchedulerAdapter, "lookup", failing)
    with pytest.raises(BenchFailed, match="a lookup found 0 tokens"):
        bench_lookup(quick=True)


def test_restart() -> None:
    figures = document("restart", "--objects", "500", "--kills", "1")
    assert (figures["objects"], figures["first_hit"]["samples"]) == (500, 1)
    assert set(figures["first_hit_s"]) == set(figures["read_s"]) == SPREAD
    assert [row["hit"] for row in figures["memcached"]] in ([], [True, False])
