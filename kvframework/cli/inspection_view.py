"""Owns how `kvframework plugins check` looks on a terminal. What a plugin says is no markup."""

from __future__ import annotations

from rich.text import Text

from kvframework.cli.console import stdout
from kvframework.inspection import Problem, Report

_STYLES = {"error": "bold red", "warning": "yellow"}


def show_report(report: Report) -> None:
    """Errors come first, then warnings, then what could not be looked at, then the sum."""
    for problem in sorted(report.problems, key=lambda each: each.severity):
        _show(problem)
    for note in report.notes:
        stdout.print(Text(f"note: {note}"))
    warnings = len(report.problems) - report.errors
    what = ", ".join(report.checked) or report.target
    if not report.problems:
        stdout.print(Text.assemble(("ok", "bold green"), f": {what}"))
    else:
        stdout.print(Text(f"{what}: {_count(report.errors, 'error')}, {_count(warnings, 'warning')}"))


def _show(problem: Problem) -> None:
    stdout.print(Text.assemble((problem.severity, _STYLES[problem.severity]), f" [{problem.id}] {problem.where}"))
    for label, text in (("", problem.fact), ("expected: ", problem.expected), ("hint: ", problem.hint)):
        if text:
            stdout.print(Text(f"  {label}{text}"))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
