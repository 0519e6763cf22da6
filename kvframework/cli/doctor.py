"""`kvframework doctor`: the problems of this machine and configuration that would impair a server."""

from __future__ import annotations

import typer
from rich.text import Text

from kvframework.api.command import EXIT_FOUND, AsJson, ConfigFile, Overrides, examples
from kvframework.api.console import print_document, print_rows, stdout
from kvframework.api.plugin import Finding
from kvframework.doctor.checkup import examine

app = typer.Typer()
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@app.command(
    epilog=examples(
        "kvframework doctor --config kvf.toml",
        "kvframework doctor --set l2.0.use=redis --set l2.0.url=redis://cache:6379",
        "kvframework doctor --json                      a document of findings",
    )
)
def doctor(config: ConfigFile = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check this machine, this installation and a configuration, and give advice for each problem.

    Run it as the server's user and with the server's limits, before the server starts or while it runs: it changes
    nothing. It checks the interpreter, memory, limits, the socket, every configured plugin with its devices and nodes,
    and the tiers' stores. A check takes 5 seconds at most. The exit status is 1 if one fails; a warning leaves it 0.
    """
    checkup = examine(config, overrides or ())
    if as_json:
        print_document(checkup)
    else:
        rows = ((Text(each.level, _STYLES[each.level]), each.id, _text(each)) for each in checkup.findings)
        print_rows(("", "CHECK", "FOUND"), rows, whole=("", "CHECK"))
        stdout.print()
        stdout.print(Text(f"{checkup.ok} ok, {checkup.warn} to check, {checkup.fail} failed"))
    if checkup.fail:
        raise typer.Exit(EXIT_FOUND)


def _text(finding: Finding) -> Text:
    """Two lines for people, one for a pipe. The name of the configuration's file is shown once, by `config.load`."""
    place = finding.where.partition(": ")[2] or finding.where
    text = Text(f"{place}: {finding.fact}" if place else finding.fact)
    if finding.advice:
        text.append("\n" if stdout.is_terminal else "; ")
        label = "" if finding.advice.startswith("available: ") else "hint: "
        text.append(f"{label}{finding.advice}", "bold" if finding.level != "ok" else "dim")
    return text
