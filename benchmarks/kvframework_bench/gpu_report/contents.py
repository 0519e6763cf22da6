"""The contents of the report: what the machine shows, and each step's result with all that it printed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from kvf_observe.dump import versions
from kvframework.masking import Redaction
from kvframework.text import short_number
from kvframework_bench.gpu_report.child import Ran, run_bounded
from kvframework_bench.gpu_report.machine import GpuMachine, look
from kvframework_bench.gpu_report.steps import DOCTOR, Step

# The form of the report, of `report.json`.
FORM = 1
_USABLE = "cuda_ipc.devices"
_NO_USE = "no GPU can be used here"
_LAST_LINES = 3

Outcome = Literal["ok", "failed", "skipped"]


class StepResult(msgspec.Struct, frozen=True):
    """`reason` is a line; of a failed step what its last lines say."""

    name: str
    outcome: Outcome
    reason: str = ""
    status: int | None = None
    seconds: float = 0.0
    limit_s: float = 0.0
    command: tuple[str, ...] = ()


class Report(msgspec.Struct, frozen=True):
    """The summary. `gpu` says whether CUDA can use a GPU for this transport here: a sentence if it cannot; `ok`: it
    can, and no step failed."""

    form: int
    at: str
    ok: bool
    gpu: str
    steps: list[StepResult]


def collect(
    steps: Sequence[Step], redaction: Redaction, *, told: Callable[[StepResult], None] = lambda _: None
) -> tuple[Report, dict[str, str]]:
    """Run the steps one after the other. Returns the summary and all texts of the file, by name. `told` is called after
    each step. Blocks for the sum of their bounds at most. An interrupt ends the step under way, and leaves out the
    rest."""
    machine = look()
    files = {
        "machine.json": _json(redaction.document(msgspec.to_builtins(machine))),
        "versions.json": _json(redaction.document(versions())),
    }
    results: list[StepResult] = []
    no_gpu = "" if machine.has_gpu else _why_no_gpu(machine, ())
    stopped = ""
    for step in steps:
        why_not = stopped or step.missing or (no_gpu if step.on_gpu else "")
        ran: Ran | None = None
        if not why_not:
            try:
                ran = run_bounded(step.command, step.limit_s, folder=step.folder)
            except KeyboardInterrupt:
                why_not = stopped = "interrupted"
        if ran is not None:
            files |= _files(step, ran, redaction)
        results.append(_result(step, ran, why_not, redaction))
        if step.name == DOCTOR and ran is not None:
            found = _findings(ran)
            no_gpu = _why_no_gpu(machine, found)
            failed = [f"{each['id']}: {each['fact']}" for each in found if each["level"] == "fail"]
            if failed and not ran.reason:
                reason = redaction.text("; ".join(failed))
                results[-1] = msgspec.structs.replace(results[-1], outcome="failed", reason=reason)
        told(results[-1])
    ok = not no_gpu and not stopped and all(each.outcome != "failed" for each in results)
    report = Report(FORM, time.strftime("%Y-%m-%dT%H:%M:%S%z"), ok, redaction.text(no_gpu), results)
    return report, {"report.json": _json(msgspec.to_builtins(report)), "report.txt": _summary(report)} | files


def _why_no_gpu(machine: GpuMachine, findings: Sequence[Mapping[str, str]]) -> str:
    """Return why no GPU can be used, "" if one can: as the doctor found, or if it found nothing and there is one."""
    found = [each for each in findings if each["id"] == _USABLE]
    if found:
        return "" if any(each["level"] != "fail" for each in found) else f"{_NO_USE}: {found[0]['fact']}"
    if machine.has_gpu:
        return ""
    if machine.driver:
        return f"{_NO_USE}: the NVIDIA driver is loaded, but names no GPU, and /dev/nvidia0 does not exist"
    on_bus = f"; NVIDIA devices on the PCI bus: {len(machine.on_the_bus)}" if machine.on_the_bus else ""
    return f"{_NO_USE}: the NVIDIA driver is not loaded, and /dev/nvidia0 does not exist{on_bus}"


def _findings(ran: Ran) -> list[dict[str, str]]:
    try:
        return list(json.loads(ran.out)["findings"])
    except (ValueError, KeyError, TypeError):
        return []


def _result(step: Step, ran: Ran | None, why_not: str, redaction: Redaction) -> StepResult:
    if ran is None:
        return StepResult(step.name, "skipped", redaction.text(why_not))
    reason = ran.reason
    if not reason and ran.status:
        last = [line.strip() for line in (ran.err.strip() or ran.out.strip()).splitlines()][-_LAST_LINES:]
        reason = f"status {ran.status}: {' / '.join(last)}"
    elif not reason and step.needs_text not in ran.out:
        reason = "nothing was run: " + " / ".join(ran.out.strip().splitlines()[-1:])
    outcome: Outcome = "failed" if reason else "ok"
    command = tuple(redaction.text(each) for each in step.command)
    return StepResult(step.name, outcome, redaction.text(reason), ran.status, ran.seconds, step.limit_s, command)


def _files(step: Step, ran: Ran, redaction: Redaction) -> Iterator[tuple[str, str]]:
    try:
        yield f"{step.name}.json", _json(redaction.document(json.loads(ran.out)))
    except ValueError:
        if ran.out.strip():
            yield f"{step.name}.txt", redaction.text(ran.out)
    if ran.err.strip():
        yield f"{step.name}.log", redaction.text(ran.err)


def _summary(report: Report) -> str:
    lines = [report.gpu or "a GPU can be used here", *map(line_of, report.steps)]
    return "".join(f"{line}\n" for line in lines)


def line_of(result: StepResult) -> str:
    """Return a step's result as a line."""
    took = f" after {short_number(result.seconds)} s" if result.command else ""
    return f"{result.name}: {result.outcome}{took}{f': {result.reason}' if result.reason else ''}"


def _json(document: object) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
