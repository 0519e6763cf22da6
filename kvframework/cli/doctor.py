"""`kvframework doctor`: the problems of this machine and configuration that would impair a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kvframework.api.command import examples
from kvframework.cli.usage import EXIT_FOUND, AsJson, ConfigFile, Overrides

if TYPE_CHECKING:
    from rich.text import Text

    from kvframework.api.plugin import Finding
    from kvframework.doctor.checkup import Checkup

_EPILOG = examples(
    "kvframework doctor --config kvf.toml",
    "kvframework doctor --set l2.0.use=redis --set l2.0.url=redis://cache:6379",
    "kvframework doctor --json                      a document of findings",
)

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def register(app: typer.Typer) -> None:
    app.command("doctor", epilog=_EPILOG)(doctor)


def doctor(
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine, this installation and a configuration, and give advice for each problem.

    Run it as the server's user and with the server's limits, before the server starts or while it runs: it changes
    nothing. It checks the interpreter, torch and CUDA, memory, limits, NUMA, the socket, every configured plugin, and
    the tiers' stores. A check takes 5 seconds at most. The exit status is 1 if one fails; a warning leaves it 0.
    """
    from kvframework.cli.console import print_document
    from kvframework.doctor.checkup import examine

    checkup = examine(config, overrides or ())
    if as_json:
        print_document(checkup)
    else:
        _show(checkup)
    if checkup.fail:
        raise typer.Exit(EXIT_FOUND)


def _show(checkup: Checkup) -> None:
    """Print a row per finding, and the totals."""
    from rich.table import Table
    from rich.text import Text

    from kvframework.api.console import stdout
    from kvframework.cli.console import print_table

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
    from rich.text import Text

    from kvframework.api.console import stdout

    place = finding.where.partition(": ")[2] or finding.where
    text = Text(f"{place}: {finding.fact}" if place else finding.fact)
    if finding.advice:
        text.append("\n" if stdout.is_terminal else "; ")
        label = "" if finding.advice.startswith("available: ") else "hint: "
        text.append(f"{label}{finding.advice}", "bold" if finding.level != "ok" else "dim")
    return text
