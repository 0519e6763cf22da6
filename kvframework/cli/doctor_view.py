"""The form of a checkup on a terminal and in a pipe."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from kvframework.api.findings import Finding
from kvframework.cli.console import print_table, stdout
from kvframework.doctor.checkup import Checkup

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def show_checkup(checkup: Checkup) -> None:
    """Print a row per finding, and the totals."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("CHECK", no_wrap=True)
    table.add_column("FOUND", overflow="fold")
    for finding in checkup.findings:
        table.add_row(Text(finding.level, _STYLES[finding.level]), Text(finding.id), _text(finding))
    print_table(table)
    stdout.print()
    stdout.print(Text(f"{checkup.ok} ok, {checkup.warn} to check, {checkup.fail} failed"))


def _text(finding: Finding) -> Text:
    """Two lines for people, one for a pipe. The name of the configuration's file is shown once, by `config.load`."""
    place = finding.where.partition(": ")[2] or finding.where
    text = Text(f"{place}: {finding.fact}" if place else finding.fact)
    if finding.advice:
        text.append("\n" if stdout.is_terminal else "; ")
        label = "" if finding.advice.startswith("available: ") else "hint: "
        text.append(f"{label}{finding.advice}", "bold" if finding.level != "ok" else "dim")
    return text
