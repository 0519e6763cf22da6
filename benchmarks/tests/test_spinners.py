"""Spinners take a core each, when they are meant to and at no other time, and always end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.tests.processor_time import spin
from benchmarks.tests.test_commands import stopped
from kvframework_bench.contention.spinners import Spinner, Spinners, running_spinners
from kvframework_bench.errors import BenchFailed
from kvframework_bench.process import scratch
from tests.support.waiting import wait_until


@contextmanager
def spinners(count: int) -> Iterator[tuple[Spinners, list[Spinner]]]:
    with scratch() as directory, running_spinners(directory, count) as made:
        yield made, list(made._spinners)


def test_spinners_run_when_they_are_meant_to_and_at_no_other_time() -> None:
    with spinners(2) as (made, processes):
        assert all(stopped(each.pid) for each in processes)
        for _ in range(2):
            before = [each.spun_s() for each in processes]
            made.begin()
            made.begin()
            assert all(each.spun_s() > earlier for each, earlier in zip(processes, before, strict=True))
            spin(0.02)
            made.end()
            made.end()
            assert all(stopped(each.pid) for each in processes)
            after = [each.spun_s() for each in processes]
            spin(0.02)
            assert [each.spun_s() for each in processes] == after
        assert len(made.cores) == 2
        assert all(0 < each <= 1.01 for each in made.cores)
    assert not any(Path(f"/proc/{each.pid}").exists() for each in processes)


def test_there_is_a_spinner_for_each_core_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, count in ((1, 1), (2, 1), (3, 2)):
        monkeypatch.setattr("kvframework_bench.contention.spinners.cores", lambda cores=cores: cores)
        with scratch() as directory, running_spinners(directory) as made:
            assert made.count == count


def test_a_spinner_that_has_ended_is_named() -> None:
    with spinners(1) as (made, (process,)):
        process._process.kill()
        process._process.wait()
        with pytest.raises(BenchFailed, match="spinner 1 ended with status -9"):
            made.begin()


def test_a_spinner_that_does_not_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvframework_bench.contention.spinners.SWITCH_S", 0.05)
    monkeypatch.setattr(Spinner, "spun_s", lambda _self: 1.0)
    with spinners(1) as (made, _), pytest.raises(BenchFailed, match="spinner 1 does not run"):
        made.begin()


def test_a_killed_bench_leaves_no_stopped_spinner(tmp_path: Path) -> None:
    """No process would ever continue it."""
    program = (
        "import pathlib, sys\n"
        "from kvframework_bench.contention.spinners import running_spinners\n"
        "with running_spinners(pathlib.Path(sys.argv[1]), 1) as spinners:\n"
        "    print(spinners._spinners[0].pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert stopped(pid)
        process.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or zombie(pid), what="the end of the spinner")


def zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
