"""`kvframework bench gpu-report`: every step is a line, whatever becomes of it; no secret is in the file."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from kvframework.masking import Redaction
from kvframework_bench.gpu_report.child import run_bounded
from kvframework_bench.gpu_report.contents import collect
from kvframework_bench.gpu_report.machine import look
from kvframework_bench.gpu_report.steps import Step, steps
from tests.core.cli.command import run
from tests.observe.test_dump import unpacked
from tests.support.waiting import wait_until

SECRET = "hunter2-of-the-tier"
UUID = "GPU-6f2e5ac0-22b4-4a0e-9b3c-0123456789ab"


def python(program: str) -> tuple[str, ...]:
    return (sys.executable, "-c", program)


def doctor(level: str, *, failed: str = "") -> Step:
    """A doctor that found a GPU, or that it cannot be used."""
    findings = [
        {"id": "cuda_ipc.devices", "level": level, "fact": f"H100, {UUID}, {SECRET}", "advice": "", "where": ""}
    ]
    if failed:
        findings.append({"id": failed, "level": "fail", "fact": "it is not there", "advice": "", "where": ""})
    return Step("doctor", python(f"print({json.dumps({'findings': findings})!r})"), 30.0)


# one step


def test_a_step_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvframework_bench.gpu_report.child._TERM_S", 0.1)
    started = tmp_path / "started"
    program = f"trap '' TERM; echo so far; sleep 600 & echo $! > {started}; sleep 600"
    for limit in (0.5, 4.0, 30.0):  # the first that lets it start
        ran = run_bounded(["sh", "-c", program], limit)
        assert (ran.status, ran.reason) == (None, f"the step did not end within {limit:g} s")
        if started.exists() and started.read_text():
            break
    assert ran.out == "so far\n"
    child = int(started.read_text())
    wait_until(lambda: not _runs(child), what="the end of what the step started")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_step_that_crashes_or_cannot_start_is_a_reason() -> None:
    ran = run_bounded(python("import os; os.write(2, b'before'); os.kill(os.getpid(), 11)"), 30.0)
    assert (ran.reason, ran.err) == ("it ended by signal SIGSEGV", "before")
    ran = run_bounded(["/nowhere/nvidia-smi"], 30.0)
    assert (ran.status, ran.reason) == (None, "the step could not be started: No such file or directory")


# the whole


def test_every_step_is_a_line_and_none_ends_the_others() -> None:
    told: list[str] = []
    report, files = collect(
        [
            doctor("ok"),
            Step("works", python(f"print({json.dumps([UUID, SECRET])!r})"), 30.0, on_gpu=True),
            Step("crashes", python("import os; os.kill(os.getpid(), 6)"), 30.0, on_gpu=True),
            Step("hangs", python("import time; time.sleep(600)"), 0.2, on_gpu=True),
            Step("refuses", python(f"import sys; print('bad {SECRET}', file=sys.stderr); sys.exit(2)"), 30.0),
            Step("skips", python("print('3 skipped')"), 30.0, needs_text=" passed"),
            Step("absent", ("none",), 30.0, missing="it is not installed: pip install it"),
        ],
        Redaction({SECRET}),
        told=lambda result: told.append(result.name),
    )
    found = {each.name: (each.outcome, each.reason) for each in report.steps}
    assert found == {
        "doctor": ("ok", ""),
        "works": ("ok", ""),
        "crashes": ("failed", "it ended by signal SIGABRT"),
        "hangs": ("failed", "the step did not end within 0.2 s"),
        "refuses": ("failed", "status 2: bad ***"),
        "skips": ("failed", "nothing was run: 3 skipped"),
        "absent": ("skipped", "it is not installed: pip install it"),
    }
    assert list(found) == told == [line.partition(":")[0] for line in files["report.txt"].splitlines()[1:]]
    assert (report.ok, report.gpu) == (False, "")
    for name, text in files.items():
        assert SECRET not in text, name
        assert UUID.removeprefix("GPU-") not in text, name
    assert json.loads(files["report.json"])["ok"] is False
    assert json.loads(files["works.json"])[1] == "***"
    assert "bad ***" in files["refuses.log"]


def test_all_well_is_ok_and_what_is_not_installed_is_no_failure() -> None:
    report, _ = collect([doctor("warn"), Step("kit", ("none",), 1.0, missing="no checkout", on_gpu=True)], Redaction())
    assert (report.ok, report.gpu) == (True, "")


def test_an_interrupt_leaves_out_the_rest_and_the_report_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvframework_bench.gpu_report.contents.run_bounded", interrupted)
    report, files = collect([doctor("ok"), Step("bench", ("none",), 1.0, on_gpu=True)], Redaction())
    assert not report.ok
    assert {each.reason for each in report.steps} == {"interrupted"}
    assert "bench: skipped: interrupted" in files["report.txt"]


def test_a_finding_that_fails_is_the_doctors_reason() -> None:
    report, _ = collect([doctor("ok", failed="limits.memlock")], Redaction())
    assert not report.ok
    assert report.steps[0].reason == "limits.memlock: it is not there"


def test_a_gpu_that_cuda_cannot_use_leaves_out_what_needs_one() -> None:
    ran = Step("bench", python("raise SystemExit('it was run')"), 30.0, on_gpu=True)
    report, files = collect([doctor("fail"), ran], Redaction({SECRET}))
    assert not report.ok
    assert report.gpu.startswith("no GPU can be used here: H100, ")
    assert [each.outcome for each in report.steps] == ["failed", "skipped"]
    assert report.steps[1].reason == report.gpu
    assert files["report.txt"].startswith(report.gpu)


def test_what_the_machine_shows_is_read_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("KVF_SECRET", SECRET)
    texts = {
        "proc/driver/nvidia/version": "NVRM version: 580.65.06",
        "proc/driver/nvidia/gpus/0000:65:00.0/information": f"Model: H100\nGPU UUID: {UUID}",
        "sys/bus/pci/devices/0000:65:00.0/vendor": "0x10de",
        "sys/bus/pci/devices/0000:65:00.0/numa_node": "1",
        "sys/bus/pci/devices/0000:00:00.0/vendor": "0x8086",
        "dev/nvidia0": "",
        "dev/nvidiactl": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = look(tmp_path)
    assert found.has_gpu
    assert found.driver == "NVRM version: 580.65.06"
    assert list(found.gpus) == list(found.on_the_bus) == ["0000:65:00.0"]
    assert found.on_the_bus["0000:65:00.0"]["numa_node"] == "1"
    assert [(each.name, each.opens) for each in found.devices] == [("nvidia0", True), ("nvidiactl", True)]
    assert found.variables["CUDA_VISIBLE_DEVICES"] == "1"
    assert "KVF_SECRET" not in found.variables
    assert not look(tmp_path / "none").has_gpu


def test_its_steps_are_those_of_a_first_run() -> None:
    made = {each.name: each for each in steps(Path("kvf.toml"), ["l1.capacity=1GiB"])}
    assert list(made) == ["doctor", "nvidia-smi", "topology", "kit", "bench", "sweep"]
    assert made["doctor"].command[-4:] == ("--config", "kvf.toml", "--set", "l1.capacity=1GiB")
    assert {name for name, step in made.items() if step.on_gpu} == {"kit", "bench", "sweep"}
    assert "transport.0.use=cuda_ipc" in steps(None, [])[0].command


@pytest.mark.skipif(look().has_gpu, reason="this machine has a GPU: the whole run would take minutes")
def test_a_machine_without_a_gpu_is_told_so_and_writes_what_it_could_see(tmp_path: Path) -> None:
    place = tmp_path / "gpu.tar.gz"
    url = f"redis://user:{SECRET}@127.0.0.1:1/0"
    done = run("bench", "gpu-report", str(place), "--set", "l2.0.use=redis", "--set", f"l2.0.url={url}")
    assert done.returncode == 1
    assert "no GPU can be used here: the NVIDIA driver is not loaded" in done.stdout
    assert "bench: skipped: no GPU can be used here" in done.stderr
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    files = unpacked(place)
    assert {"report.json", "report.txt", "machine.json", "versions.json", "doctor.json"} <= files.keys()
    assert json.loads(files["doctor.json"])["findings"]
    assert json.loads(files["machine.json"])["pid_namespace"] == os.readlink("/proc/self/ns/pid")
    for name, text in files.items():
        assert SECRET not in text, name
    again = run("bench", "gpu-report", str(place))
    assert again.returncode == 2
    assert "File exists" in again.stderr
