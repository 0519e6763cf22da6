"""The whole inspection of a plugin: the checks of this process, the results of other processes, and the report. Runs in
the process of a command; blocks for seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from kvf_dev.inspection.cost import cost_problems
from kvf_dev.inspection.problems import Line, Problem, problem
from kvf_dev.inspection.targets import Target, find_targets, import_problems, metadata_problems, read_sources
from kvframework.supervise.child import Ran, run_isolated

DEADLINE_S = 20.0


class Report(msgspec.Struct, frozen=True):
    """The result. `checked` are the inspected providers; `notes` name the parts that could not be inspected, and
    why."""

    target: str
    checked: list[str]
    problems: list[Problem]
    notes: list[str]

    @property
    def errors(self) -> int:
        return sum(each.severity == "error" for each in self.problems)


def inspect_plugin(text: str, options: Mapping[str, object] | None = None, *, deadline_s: float = DEADLINE_S) -> Report:
    """Inspects MODULE or KIND.NAME; the latter may be given `options` for its `create`. No plugin code is imported into
    this process; a step that takes longer than `deadline_s` is ended and reported. Raises `PluginNotFound` and
    `PluginWrongKind` if there is no such plugin, `ConfigFieldError` for options of a module."""
    checked: list[str] = []
    problems: list[Problem] = []
    notes: list[str] = []
    for target in find_targets(text, options or {}):
        for line in _inspect(target, deadline_s):
            problems += [line.problem] if line.problem else []
            notes += [line.note] if line.note else []
            checked += [line.provider] if line.provider else []
    return Report(text, list(dict.fromkeys(checked)), list(dict.fromkeys(problems)), list(dict.fromkeys(notes)))


def _inspect(target: Target, deadline_s: float) -> Iterator[Line]:
    for each in metadata_problems(target):
        yield Line(problem=each)
    for each in import_problems(read_sources(target.module)):
        yield Line(problem=each)
    found, importable = cost_problems(
        target.module, {offer.distribution for offer in target.offers}, deadline_s=deadline_s
    )
    for each in found:
        yield Line(problem=each)
    if importable:
        ran = run_isolated("kvf_dev.inspection.process", msgspec.json.encode(target), deadline_s=deadline_s)
        lines = [msgspec.json.decode(line, type=Line) for line in ran.lines]
        yield from lines
        if ran.ended:
            yield Line(problem=_death(target, ran, [line.step for line in lines if line.step][-1]))


def _death(target: Target, ran: Ran, step: str) -> Problem:
    said = ran.printed.strip().splitlines()
    cause = f": {said[-1]}" if said else ""
    if step.startswith("create of "):
        name, where = "create-dies", step.removeprefix("create of ")
    elif step.startswith("the probe of "):
        name, where = "probe-fails", step.removeprefix("the probe of ")
    else:
        name, where = ("import-fails" if step == "import" else "hook-fails"), target.value
    return problem(
        name,
        where,
        f"{step}: the process {ran.ended}{cause}",
        expected="a call that returns",
        hint="a plugin raises errors, and gives every wait a deadline",
    )
