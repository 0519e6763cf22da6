"""`kvframework doctor`: the problems of this machine and configuration that would impair a server."""

from __future__ import annotations

import typer

from kvframework.cli.usage import EXIT_FOUND, AsJson, ConfigFile, Overrides, examples

_EPILOG = examples(
    "kvframework doctor --config kvf.toml",
    "kvframework doctor --set l2.0.use=redis --set l2.0.url=redis://cache:6379",
    "kvframework doctor --json                      a document of findings",
)


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
    from kvframework.cli.doctor_view import show_checkup
    from kvframework.doctor.checkup import examine

    checkup = examine(config, overrides or ())
    if as_json:
        print_document(checkup)
    else:
        show_checkup(checkup)
    if checkup.fail:
        raise typer.Exit(EXIT_FOUND)
